"""Ends a process whose engine hangs in a step, so that its supervisor starts another."""

from __future__ import annotations

import faulthandler

HUNG_S = 60.0  # far longer than any step takes: the next process has to load the model
FRESH_S = 5.0  # a heartbeat that is older tells of a step that may hang


class HangWatch:
    """`read` now and then. The process ends with status 1, and its stacks on standard error, when no reading was a
    fresh heartbeat for `limit_s`. Python's lock may be held meanwhile. One in a process.
    """

    def __init__(self, limit_s: float = HUNG_S) -> None:
        self._limit_s = limit_s

    def read(self, heartbeat_age_s: float) -> None:
        """`heartbeat_age_s`: as in EngineStats."""
        if heartbeat_age_s < FRESH_S:
            faulthandler.dump_traceback_later(self._limit_s, exit=True)

    def close(self) -> None:
        """The process may take any time now."""
        faulthandler.cancel_dump_traceback_later()
