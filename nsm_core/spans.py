"""Named parts of a model's work, for whoever wants to know when they ran; nobody does by default. No torch here."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
Listener = Callable[[str], AbstractContextManager[object]]

# The parts of the model, by the literature's names for them: docs/performance.md, "Where a model's time goes"
PARTS = (
    "router",  # which states a token writes to, and how strongly
    "propagator",  # how states change
    "communication",  # states that exchange what they hold
    "projector",  # how states are read
    "convolution",  # of a token with those just before it
    "attention",  # to tokens: layers W and A
    "mixer",  # the rest of a layer: projections in and out; layers of other kinds
    "feed_forward",
    "head",  # logits
    "model",  # the rest: embedding, norms, residuals
)

_listener: Listener | None = None
_NOTHING = contextlib.nullcontext()


def span(part: str) -> AbstractContextManager[object]:
    """While open, `part` (of PARTS) is at work. Without a listener this is one comparison."""
    return _NOTHING if _listener is None else _listener(part)


def spanned(part: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A function that is `part` at work."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            if _listener is None:
                return function(*args, **kwargs)
            with _listener(part):
                return function(*args, **kwargs)

        return run

    return decorate


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """While open, `listener(part)` is entered and left around every part, on whatever thread; the last one listens."""
    global _listener
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before
