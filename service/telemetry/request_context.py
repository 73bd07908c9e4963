"""The HTTP request that is being answered, for what is far from its handler: logs and counts."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from contextvars import ContextVar


@dataclasses.dataclass(slots=True)
class CurrentRequest:
    """`error`: the code of the error it was answered with, in a stream too. `trace_id`: 32 hexadecimal digits, where it
    is traced.
    """

    request_id: str
    error: str | None = None
    trace_id: str | None = None


_current: ContextVar[CurrentRequest | None] = ContextVar("nsm_current_request", default=None)


@contextlib.contextmanager
def answering(request_id: str) -> Iterator[CurrentRequest]:
    """Around all that is done for a request; tasks that begin inside keep it."""
    request = CurrentRequest(request_id)
    token = _current.set(request)
    try:
        yield request
    finally:
        _current.reset(token)


def current_request() -> CurrentRequest | None:
    """None outside of any."""
    return _current.get()
