"""Arrival times of requests' tokens, and the figures made from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from nsm_lab.bench.result import quantile

PERCENTILES = (50, 90, 99)


@dataclasses.dataclass(slots=True, kw_only=True)
class RequestTimes:
    """One request; all times are readings of one clock, in seconds.

    `pieces`: when each piece of text came. `num_tokens`: as the server counts them; a piece may be several tokens.
    """

    started: float
    pieces: list[float] = dataclasses.field(default_factory=list)
    ended: float = 0.0
    num_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        """Time to the first piece, or to the end if there was none."""
        return (self.pieces[0] if self.pieces else self.ended) - self.started

    @property
    def gaps_s(self) -> list[float]:
        """Gaps between pieces."""
        return [after - before for before, after in zip(self.pieces, self.pieces[1:], strict=False)]


def load_figures(prefix: str, requests: Sequence[RequestTimes], *, cpu_s: float | None) -> dict[str, float]:
    """Throughput and latency of requests that ran together. `cpu_s`: their CPU seconds, None: unknown."""
    wall_s = max(request.ended for request in requests) - min(request.started for request in requests)
    num_tokens = sum(request.num_tokens for request in requests)
    figures = {f"{prefix}.tokens_per_s": num_tokens / wall_s}
    if cpu_s:
        figures[f"{prefix}.tokens_per_cpu_s"] = num_tokens / cpu_s
    durations = {
        "ttft": [request.ttft_s for request in requests],
        "itl": [gap for request in requests for gap in request.gaps_s],
        "e2e": [request.ended - request.started for request in requests],
    }
    for name, values in durations.items():
        ordered = sorted(values)
        for percentile in PERCENTILES if ordered else ():
            figures[f"{prefix}.{name}_p{percentile}_ms"] = quantile(ordered, percentile / 100) * 1e3
    return figures
