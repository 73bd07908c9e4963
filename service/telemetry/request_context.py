"""The current HTTP request, for logs and metrics."""

from __future__ import annotations

import dataclasses
from contextvars import ContextVar

# in the scope's state: there once the server has the whole body
WHOLE_BODY = "has_whole_body"
ARRIVAL = "arrival"  # in the scope's state: `time.monotonic()` when the server read the request's first byte


@dataclasses.dataclass(slots=True)
class CurrentRequest:
    """`error`: code of the error in its answer or stream. `trace_id`: 32 hexadecimal digits, None without a trace."""

    request_id: str
    error: str | None = None
    trace_id: str | None = None


_current: ContextVar[CurrentRequest | None] = ContextVar("nsm_current_request", default=None)


class answering:  # noqa: N801  # used like a function, at half of a generator's cost
    """Around the handling of a request; tasks started inside inherit it."""

    __slots__ = ("_request_id", "_token")

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id

    def __enter__(self) -> CurrentRequest:
        request = CurrentRequest(self._request_id)
        self._token = _current.set(request)
        return request

    def __exit__(self, *error: object) -> None:
        _current.reset(self._token)


def current_request() -> CurrentRequest | None:
    """None outside of a request."""
    return _current.get()
