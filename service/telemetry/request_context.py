"""The current HTTP request, for logs and metrics."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from contextvars import ContextVar

ARRIVAL = "arrival"  # in the scope's state: `time.monotonic()` when the server read the request's first byte


@dataclasses.dataclass(slots=True)
class CurrentRequest:
    """`error`: code of the error in its answer or stream. `trace_id`: 32 hexadecimal digits, None without a trace."""

    request_id: str
    error: str | None = None
    trace_id: str | None = None


_current: ContextVar[CurrentRequest | None] = ContextVar("nsm_current_request", default=None)


@contextlib.contextmanager
def answering(request_id: str) -> Iterator[CurrentRequest]:
    """Around the handling of a request; tasks started inside inherit it."""
    request = CurrentRequest(request_id)
    token = _current.set(request)
    try:
        yield request
    finally:
        _current.reset(token)


def current_request() -> CurrentRequest | None:
    """None outside of a request."""
    return _current.get()
