"""When a request came, got its slot and had its first token."""

from __future__ import annotations

import dataclasses

from nsm_core.engine.request import Timings


@dataclasses.dataclass(slots=True)
class Timeline:
    """Readings of one clock, in seconds."""

    arrival: float
    admitted: float | None = None
    first_token: float | None = None

    def timings(self, now: float) -> Timings:
        """For a request that ends at `now`."""
        if self.admitted is None:
            return Timings(queue_s=now - self.arrival)
        queue_s = self.admitted - self.arrival
        if self.first_token is None:
            return Timings(queue_s=queue_s)
        return Timings(queue_s=queue_s, prefill_s=self.first_token - self.admitted, decode_s=now - self.first_token)
