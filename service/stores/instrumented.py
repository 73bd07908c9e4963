"""Stores whose calls are spans of the trace that they are made in; those of sessions are measured as well."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Literal, cast

from opentelemetry.trace import NoOpTracer, SpanKind, StatusCode, Tracer, get_current_span

from nsm_core.errors import LogCorrupt, NsmError, SnapshotCorrupt, StoreDamaged, StoreUnavailable
from service.stores.prefixes.base import PrefixStore
from service.stores.records.base import RecordStore
from service.stores.sessions.base import LeasedSession, SessionStore, StoredSession
from service.stores.sessions.key import SessionKey
from service.stores.sessions.sqlite import SqliteSessionStore
from service.stores.sessions.transitions import TOKEN_BYTES, Commit, LateSnapshot, NewSession, Rewind
from service.stores.states.base import StateStore
from service.telemetry.metrics.sessions import DamagedPart, SessionMetrics

# Methods of SessionStore that carry a request; the rest is the server's own upkeep.
OPERATIONS = (
    *("acquire", "renew", "release", "commit", "rewind", "put_snapshot", "create", "update", "delete", "get", "load"),
    *("begin_turn", "append_turn", "end_turn", "forget_turn", "get_turn", "cancel_turn"),
    *("read_log", "log_marks", "list", "list_retained", "load_retained"),
)
PREFIX_OPERATIONS = ("find", "load", "put", "remove")  # of PrefixStore, as for the next
STATE_OPERATIONS = ("add", "get", "load", "list", "delete")
RECORD_OPERATIONS = ("get", "get_many", "put", "let_go", "delete")
Method = Callable[..., Coroutine[Any, Any, Any]]
Outcome = Literal["ok", "refused", "failed"]


def instrumented(store: SessionStore, metrics: SessionMetrics, tracer: Tracer | None = None) -> SessionStore:
    """The same store. Without a tracer there are no spans."""
    return cast(SessionStore, _InstrumentedStore(store, metrics, tracer or NoOpTracer()))


def traced_prefixes(store: PrefixStore, tracer: Tracer) -> PrefixStore:
    """The same store."""
    return cast(PrefixStore, _TracedStore(store, "prefixes", PREFIX_OPERATIONS, tracer))


def instrumented_records(store: RecordStore, metrics: SessionMetrics, tracer: Tracer | None = None) -> RecordStore:
    """The same store, with the damage that it meets counted. Without a tracer there are no spans."""
    return cast(RecordStore, _TracedStore(store, "records", RECORD_OPERATIONS, tracer or NoOpTracer(), metrics))


def instrumented_states(store: StateStore, metrics: SessionMetrics, tracer: Tracer | None = None) -> StateStore:
    """The same store, with the damage that it meets counted. Without a tracer there are no spans."""
    return cast(StateStore, _TracedStore(store, "states", STATE_OPERATIONS, tracer or NoOpTracer(), metrics))


class _InstrumentedStore:
    """Stands for the store by having its methods, measured or as they are."""

    def __init__(self, store: SessionStore, metrics: SessionMetrics, tracer: Tracer) -> None:
        self._store = store
        self._metrics = metrics
        self._tracer = tracer
        for name in OPERATIONS:
            setattr(self, name, self._measured(name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def open(self) -> None:
        await self._store.open()
        if isinstance(self._store, SqliteSessionStore) and self._store.database.num_lost_writes:
            self._metrics.store_damaged("lost_writes")

    async def check_writable(self) -> None:
        with _counting_damage(self._metrics):
            await self._store.check_writable()

    def _measured(self, operation: str) -> Method:
        async def call(*args: Any, **fields: Any) -> Any:
            method, started = getattr(self._store, operation), time.monotonic()
            try:
                if get_current_span().get_span_context().is_valid:
                    with _span(self._tracer, "store", operation, _attributes(args)):
                        result = await method(*args, **fields)
                else:
                    result = await method(*args, **fields)
            except BaseException as error:
                outcome: Outcome = "refused" if _is_refusal(error) else "failed"
                self._metrics.store_called(operation, time.monotonic() - started, outcome=outcome)
                if isinstance(error, SnapshotCorrupt | StoreDamaged):
                    self._metrics.store_damaged(_damaged_part(error))
                raise
            self._metrics.store_called(
                operation,
                time.monotonic() - started,
                outcome="ok",
                num_read=_num_read(result),
                num_written=_num_written(args, fields),
            )
            return result

        return call


class _TracedStore:
    """Stands for a store by having its methods, each call of `operations` inside a span."""

    def __init__(
        self,
        store: object,
        name: str,
        operations: Sequence[str],
        tracer: Tracer,
        metrics: SessionMetrics | None = None,
    ) -> None:
        self._store = store
        self._name = name
        self._tracer = tracer
        self._metrics = metrics
        for operation in operations:
            setattr(self, operation, self._traced(operation))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def _traced(self, operation: str) -> Method:
        async def call(*args: Any, **fields: Any) -> Any:
            attributes = _attributes(args, **fields)
            with _counting_damage(self._metrics), _span(self._tracer, self._name, operation, attributes):
                return await getattr(self._store, operation)(*args, **fields)

        return call


@contextlib.contextmanager
def _span(tracer: Tracer, store: str, operation: str, attributes: dict[str, str]) -> Iterator[None]:
    """Around one call. A refusal is noted, but is no failure of the store. Calls that no request makes have no span."""
    if not get_current_span().get_span_context().is_valid:
        yield
        return
    attributes = {"db.operation.name": operation, **attributes}
    with tracer.start_as_current_span(
        f"{store} {operation}",
        kind=SpanKind.CLIENT,
        attributes=attributes,
        record_exception=False,
        set_status_on_exception=False,
    ) as span:
        try:
            yield
        except BaseException as error:
            span.set_attribute("error.type", type(error).__name__)
            if not _is_refusal(error):
                span.set_status(StatusCode.ERROR)
            raise


@contextlib.contextmanager
def _counting_damage(metrics: SessionMetrics | None) -> Iterator[None]:
    """`metrics`: None for a cache, whose damage costs nothing."""
    try:
        yield
    except (SnapshotCorrupt, StoreDamaged) as error:
        if metrics is not None:
            metrics.store_damaged(_damaged_part(error))
        raise


def _damaged_part(error: NsmError) -> DamagedPart:
    if isinstance(error, StoreDamaged):
        return "files"
    return "log" if isinstance(error, LogCorrupt) else "snapshot"


def _attributes(args: Sequence[object], *, kind: str | None = None, **_: object) -> dict[str, str]:
    """Of the session or the kind of documents that a call names."""
    attributes = {} if kind is None else {"db.collection.name": kind}
    target = args[0] if args else None
    key = target if isinstance(target, SessionKey) else getattr(target, "key", None)
    return attributes | ({"gen_ai.conversation.id": key.session_id} if isinstance(key, SessionKey) else {})


def _is_refusal(error: BaseException) -> bool:
    """Whether the store refused the call, as against failed."""
    return isinstance(error, NsmError) and not isinstance(error, StoreUnavailable)


def _num_read(result: object) -> int:
    """Bytes of a snapshot or a log."""
    if isinstance(result, LeasedSession):
        result = result.stored
    if isinstance(result, StoredSession):
        result = result.snapshot
    if isinstance(result, bytes):
        return len(result)
    is_log = isinstance(result, tuple) and result and isinstance(result[0], int)
    return TOKEN_BYTES * len(cast("tuple[int, ...]", result)) if is_log else 0


def _num_written(args: Sequence[object], fields: dict[str, Any]) -> int:
    written = sum(value.num_bytes for value in args if isinstance(value, Commit | LateSnapshot | NewSession | Rewind))
    return written + len(fields.get("chunk") or b"")
