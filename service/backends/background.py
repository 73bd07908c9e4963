"""Requests of batches, marked as such: engines put them behind the others."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from contextvars import ContextVar

from nsm_core.engine.request import GenerationRequest
from service.backends.base import Generation
from service.backends.delegating import DelegatingBackend

_is_background: ContextVar[bool] = ContextVar("nsm_is_background", default=False)


@contextlib.contextmanager
def in_background() -> Iterator[None]:
    """Requests that are submitted inside are background requests."""
    token = _is_background.set(True)
    try:
        yield
    finally:
        _is_background.reset(token)


class BackgroundBackend(DelegatingBackend):
    """Marks the requests that are submitted `in_background`."""

    def submit(self, request: GenerationRequest) -> Generation:
        if _is_background.get():
            request = dataclasses.replace(request, is_background=True)
        return self._backend.submit(request)
