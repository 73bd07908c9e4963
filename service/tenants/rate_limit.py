"""A token bucket."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

ROUNDING = 1e-9  # a client that waits exactly as long as it was told must not be refused over the last bit


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """What a bucket answered. `retry_after_s`: None when the request was let in, or how long until one will be.

    `remaining`: how many more would be let in now; `reset_s`: until all `limit` of them would.
    """

    per_s: float
    limit: int
    remaining: int
    reset_s: float
    retry_after_s: float | None


class TokenBucket:
    """Starts full. Its size and rate come with every call: they may change while it is in use."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: seconds, never going back."""
        self._clock = clock
        self._missing = 0.0  # tokens below the brim
        self._at = clock()

    def take(self, *, per_s: float, burst: int) -> Allowance:
        """Takes a token if there is a whole one."""
        now = self._clock()
        self._missing = min(max(0.0, self._missing - (now - self._at) * per_s), float(burst))
        self._at = now
        is_allowed = self._missing + 1 <= burst + ROUNDING
        retry_after_s = None if is_allowed else (self._missing + 1 - burst) / per_s
        if is_allowed:
            self._missing += 1
        return Allowance(
            per_s=per_s,
            limit=burst,
            remaining=int(max(0.0, burst - self._missing + ROUNDING)),
            reset_s=self._missing / per_s,
            retry_after_s=retry_after_s,
        )
