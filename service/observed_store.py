"""A store of sessions whose calls are measured, and are spans of the trace that they are made in."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Coroutine
from typing import Any, Literal, cast

from opentelemetry.trace import NoOpTracer, SpanKind, StatusCode, Tracer

from nsm_core.errors import NsmError, StoreUnavailable
from service.metrics.sessions import SessionMetrics
from service.sessions.base import LeasedSession, SessionStore, StoredSession
from service.sessions.records import TOKEN_BYTES

# Methods of SessionStore that carry a request; the rest is the server's own upkeep.
OPERATIONS = frozenset(
    "acquire append_turn begin_turn cancel_turn commit create create_with delete end_turn forget_turn get get_turn list "
    "list_kept load load_kept log_marks read_log release renew rewind update".split()
)
Method = Callable[..., Coroutine[Any, Any, Any]]


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
            setattr(self, name, self._measured(name, getattr(store, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def _measured(self, operation: str, method: Method) -> Method:
        @functools.wraps(method)
        async def call(*args: Any, **fields: Any) -> Any:
            started, outcome, num_read = time.monotonic(), cast(Outcome, "failed"), 0
            with self._tracer.start_as_current_span(f"store {operation}", kind=SpanKind.CLIENT) as span:
                span.set_attribute("db.operation.name", operation)
                if "session_id" in fields:
                    span.set_attribute("gen_ai.conversation.id", fields["session_id"])
                try:
                    result = await method(*args, **fields)
                    outcome, num_read = "ok", _num_read(result)
                except NsmError as error:
                    outcome = "failed" if isinstance(error, StoreUnavailable) else "refused"
                    span.set_attribute("error.type", type(error).__name__)
                    span.set_status(StatusCode.ERROR if outcome == "failed" else StatusCode.UNSET)
                    raise
                finally:
                    seconds, num_written = time.monotonic() - started, 0 if outcome != "ok" else _num_written(fields)
                    self._metrics.store_called(
                        operation, seconds, outcome=outcome, num_read=num_read, num_written=num_written
                    )
            return result

        return call


Outcome = Literal["ok", "refused", "failed"]


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
