"""Requests of batches, marked as such: engines put them behind the others."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from contextvars import ContextVar

from nsm_core.engine.request import GenerationRequest

_is_background: ContextVar[bool] = ContextVar("nsm_is_background", default=False)


@contextlib.contextmanager
def in_background() -> Iterator[None]:
    """Requests that are submitted inside are background requests."""
    token = _is_background.set(True)
    try:
        yield
    finally:
        _is_background.reset(token)


def with_priority(request: GenerationRequest) -> GenerationRequest:
    """The request as whoever submits it now must mark it."""
    return dataclasses.replace(request, is_background=True) if _is_background.get() else request
