"""The record of one request, and figures over many. Names say whether a value is in milliseconds or seconds."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from loadtests.errors import RunError

# ok: answered, and as the reference says; wrong: another text than the reference, or other counts than it must have;
# rejected: 429 or 503; busy: the session has a turn (409); cancelled: the client's own doing; failed: anything else;
# unfinished: the run ended first
Outcome = Literal["ok", "wrong", "rejected", "busy", "cancelled", "failed", "unfinished"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


@dataclasses.dataclass(slots=True, kw_only=True)
class Sample:
    """One request. All times count from `intended_s`, when it should have been sent: a client that is late, or waits
    for others, makes them longer, never fewer.

    `step`: the part of an open loop that it belongs to. `itl_ms`: the gap before each piece of text but the first.
    `resumed_tokens`: those of the prompt that a stored state covered.
    """

    scenario: str
    step: str = ""
    intended_s: float  # Unix time
    lag_ms: float = 0.0  # sent so long after it should have been
    outcome: Outcome = "failed"
    status: int = 0
    ttft_ms: float | None = None
    e2e_ms: float | None = None
    itl_ms: list[float] = dataclasses.field(default_factory=list)
    prompt_tokens: int = 0
    resumed_tokens: int = 0
    tokens: int = 0
    retry_after_s: float | None = None
    problem: str = ""

    @property
    def tokens_per_s(self) -> float | None:
        """Of the answer, while it was written; None where it has no duration."""
        if self.e2e_ms is None or self.ttft_ms is None or self.tokens < 2 or self.e2e_ms <= self.ttft_ms:
            return None
        return (self.tokens - 1) / (self.e2e_ms - self.ttft_ms) * 1000

    @property
    def end_s(self) -> float:
        """Unix time."""
        return self.intended_s + (self.e2e_ms or 0.0) / 1000

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))


def read_samples(path: Path) -> list[Sample]:
    """A file with one sample a line. Raises RunError when it is not there, or is something else."""
    try:
        return [Sample(**json.loads(line)) for line in path.read_text("utf-8").splitlines()]
    except (OSError, ValueError, TypeError) as error:
        raise RunError(f"{path} cannot be read as samples: {error}") from error


def percentile(values: Iterable[float], share: float) -> float | None:
    """The smallest value that at least `share` (0 to 1) of the values do not exceed; None of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


MEASURES: dict[str, Callable[[Sample], Sequence[float | None]]] = {
    "ttft_ms": lambda sample: (sample.ttft_ms,),
    "itl_ms": lambda sample: sample.itl_ms,
    "e2e_ms": lambda sample: (sample.e2e_ms,),
    "tokens_per_s": lambda sample: (sample.tokens_per_s,),
}


def values_of(samples: Iterable[Sample], measure: str) -> list[float]:
    """All values of one of MEASURES."""
    return [value for sample in samples for value in MEASURES[measure](sample) if value is not None]


def duration_s(samples: Sequence[Sample]) -> float:
    """From the first intended start to the last end."""
    return max(sample.end_s for sample in samples) - min(sample.intended_s for sample in samples) if samples else 0.0


def summary(samples: Sequence[Sample]) -> dict[str, Any]:
    """Counts by outcome, tokens, rates, and percentiles of the full and right answers."""
    good = [sample for sample in samples if sample.outcome == "ok"]
    seconds = duration_s(samples)
    figures: dict[str, Any] = {
        "requests": len(samples),
        **{outcome: sum(sample.outcome == outcome for sample in samples) for outcome in OUTCOMES},
        "tokens": sum(sample.tokens for sample in samples),
        "resumed_tokens": sum(sample.resumed_tokens for sample in samples),
        "computed_tokens": sum(sample.prompt_tokens - sample.resumed_tokens for sample in samples),
        "requests_per_s": len(good) / seconds if seconds else 0.0,
        "output_tokens_per_s": sum(sample.tokens for sample in samples) / seconds if seconds else 0.0,
        "lag_ms": {"p99": percentile((sample.lag_ms for sample in samples), 0.99)},
    }
    for measure in MEASURES:
        values = values_of(good, measure)
        figures[measure] = {f"p{share}": percentile(values, share / 100) for share in (50, 90, 99)}
    return figures


def by_group(samples: Iterable[Sample]) -> dict[tuple[str, str], list[Sample]]:
    """Samples by (scenario, step), in order of their first request."""
    groups: dict[tuple[str, str], list[Sample]] = {}
    for sample in sorted(samples, key=lambda sample: sample.intended_s):
        groups.setdefault((sample.scenario, sample.step), []).append(sample)
    return groups
