"""Interpolates a counter that moves in jumps and is read at intervals."""

from __future__ import annotations

MAX_GAP_S = 0.6  # a counter that stood still for longer is believed


class SteadyCounter:
    """A GPU's energy counter moves ten to fifty times a second, and asking for it takes milliseconds: steps of the
    model fall between two looks, and would have cost nothing, or all. Between them the counter is taken to rise as fast
    as it did between the last two moves. Over time its error never exceeds the energy used since the last sample.
    """

    def __init__(self, joules: float, now: float) -> None:
        """`joules`: what the counter shows at `now`, in seconds of any clock. Counting starts there."""
        self._start = self._shown = joules
        self._changed_at = now
        self._watts = 0.0
        self._reported = 0.0

    def show(self, joules: float, now: float) -> None:
        """A look at the counter."""
        if joules > self._shown:
            if now > self._changed_at:
                self._watts = (joules - self._shown) / (now - self._changed_at)
            self._shown, self._changed_at = joules, now

    def read(self, now: float) -> float:
        """Joules since the start. Never fewer than before."""
        gap_s = max(0.0, now - self._changed_at)
        ahead = self._watts * gap_s if gap_s <= MAX_GAP_S else 0.0
        self._reported = max(self._reported, self._shown - self._start + ahead)
        return self._reported
