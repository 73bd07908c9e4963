"""Steps that take too long: counted, and logged when several follow each other."""

from __future__ import annotations

import logging

logger = logging.getLogger("nsm.engine")

SLOW_STEP_S = 1.0
MANY_IN_A_ROW = 5


class SlowSteps:
    """One warning for each row of slow steps, and one line when it ends."""

    def __init__(self) -> None:
        self.total = 0
        self._in_a_row = 0
        self._seconds = 0.0  # of that row

    def record(self, seconds: float) -> None:
        """After each step."""
        if seconds <= SLOW_STEP_S:
            self._end_row()
            return
        self.total += 1
        self._in_a_row += 1
        self._seconds += seconds
        if self._in_a_row == MANY_IN_A_ROW:
            logger.warning(
                "the last %d steps took %.1f s on average; %g s is slow",
                MANY_IN_A_ROW,
                self._seconds / MANY_IN_A_ROW,
                SLOW_STEP_S,
            )

    def _end_row(self) -> None:
        if self._in_a_row >= MANY_IN_A_ROW:
            logger.info("steps are fast again, after %d slow ones in %.1f s", self._in_a_row, self._seconds)
        self._in_a_row, self._seconds = 0, 0.0
