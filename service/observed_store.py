"""A store of sessions whose calls are measured, and are spans of the trace that they are made in."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from typing import Any, Literal, cast

from opentelemetry.trace import NoOpTracer, Span, SpanKind, StatusCode, Tracer

from nsm_core.errors import NsmError, StoreUnavailable
from service.metrics.sessions import SessionMetrics
from service.sessions.base import LeasedSession, SessionStore, StoredSession
from service.sessions.records import TOKEN_BYTES

# Methods of SessionStore that carry a request; the rest is the server's own upkeep.
OPERATIONS = (
    *("acquire", "renew", "release", "commit", "rewind", "create", "create_with", "update", "delete", "get", "load"),
    *("begin_turn", "append_turn", "end_turn", "forget_turn", "get_turn", "cancel_turn"),
    *("read_log", "log_marks", "list", "list_kept", "load_kept"),
)
Method = Callable[..., Coroutine[Any, Any, Any]]
Outcome = Literal["ok", "refused", "failed"]


def observed(store: SessionStore, metrics: SessionMetrics, tracer: Tracer | None = None) -> SessionStore:
    """The same store. Without a tracer there are no spans."""
    return cast(SessionStore, _ObservedStore(store, metrics, tracer or NoOpTracer()))


class _ObservedStore:
    """Stands for the store by having its methods, measured or as they are."""

    def __init__(self, store: SessionStore, metrics: SessionMetrics, tracer: Tracer) -> None:
        self._store = store
        self._metrics = metrics
        self._tracer = tracer
        for name in OPERATIONS:
            setattr(self, name, self._measured(name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def _measured(self, operation: str) -> Method:
        async def call(*args: Any, **fields: Any) -> Any:
            started = time.monotonic()
            with self._span(operation, fields) as span:
                try:
                    result = await getattr(self._store, operation)(*args, **fields)
                except BaseException as error:
                    outcome: Outcome = "refused" if _is_refusal(error) else "failed"
                    self._metrics.store_called(operation, time.monotonic() - started, outcome=outcome)
                    span.set_attribute("error.type", type(error).__name__)
                    if outcome == "failed":
                        span.set_status(StatusCode.ERROR)
                    raise
            self._metrics.store_called(
                operation,
                time.monotonic() - started,
                outcome="ok",
                num_read=_num_read(result),
                num_written=_num_written(fields),
            )
            return result

        return call

    def _span(self, operation: str, fields: dict[str, Any]) -> AbstractContextManager[Span]:
        attributes = {"db.operation.name": operation}
        if "session_id" in fields:
            attributes["gen_ai.conversation.id"] = fields["session_id"]
        return self._tracer.start_as_current_span(
            f"store {operation}",
            kind=SpanKind.CLIENT,
            attributes=attributes,
            record_exception=False,
            set_status_on_exception=False,
        )


def _is_refusal(error: BaseException) -> bool:
    """What the store said no to, as against what it could not do."""
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


def _num_written(fields: dict[str, Any]) -> int:
    ids = fields.get("new_ids") or fields.get("log_ids") or ()
    return len(fields.get("snapshot") or b"") + len(fields.get("chunk") or b"") + TOKEN_BYTES * len(ids)
