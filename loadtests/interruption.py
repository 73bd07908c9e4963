"""Ctrl-C and SIGTERM during a run."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


class Interrupted(BaseException):
    """A signal ended the run. Like KeyboardInterrupt, no handler of errors may catch it."""

    def __init__(self, number: int) -> None:
        self.name = signal.Signals(number).name
        super().__init__(f"the run was ended by {self.name}")


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGINT and SIGTERM raise Interrupted, so that servers and Locust are stopped and the samples read."""

    def interrupt(number: int, _: object) -> None:
        raise Interrupted(number)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
