"""Several requests at once, as one act of a user."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import gevent

Result = TypeVar("Result")


def all_results(acts: Sequence[Callable[[], Result]]) -> list[Result]:
    """Runs them at once and waits for every one; then raises the first error, if there was one.

    One that fails does not cut the others: a request that is cut counts as a failure of the server. When the caller is
    killed, they are.
    """
    greenlets = [gevent.spawn(act) for act in acts]
    try:
        gevent.joinall(greenlets)
    finally:
        gevent.killall(greenlets)
    return [greenlet.get() for greenlet in greenlets]
