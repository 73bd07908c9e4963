"""A counter that moves in jumps, read as if it rose steadily."""

from __future__ import annotations

MAX_GAP_S = 0.25  # a counter that stood still for longer is believed


class SteadyCounter:
    """A GPU's energy counter moves ten to fifty times a second: a step of the model falls between two moves, and would
    have cost nothing, or all. Between them the counter is taken to rise as fast as it did between the last two. Over
    time it is never off by more than what was used since the last move.
    """

    def __init__(self, joules: float, now: float) -> None:
        """`joules`: what the counter shows at `now`, in seconds of any clock. Counting starts there."""
        self._start = self._shown = joules
        self._moved_at = now
        self._watts = 0.0
        self._told = 0.0

    def advance(self, joules: float, now: float) -> float:
        """Joules since the start, given that the counter shows `joules` at `now`. Never fewer than before."""
        if joules > self._shown:
            if now > self._moved_at:
                self._watts = (joules - self._shown) / (now - self._moved_at)
            self._shown, self._moved_at = joules, now
        gap_s = now - self._moved_at
        ahead = self._watts * gap_s if gap_s <= MAX_GAP_S else 0.0
        self._told = max(self._told, self._shown - self._start + ahead)
        return self._told
