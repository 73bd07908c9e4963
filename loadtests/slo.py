"""Service level objectives: a TOML file, checked once, and what of it a run has missed.

[[objective]]
scenario = "chat"                     # default "*": all; "slow_*" and the like fit as well
ttft_ms = { p50 = 300, p99 = 2000 }   # upper limits
tokens_per_s = { p10 = 5 }            # a lower limit: a tenth of the answers may be slower
max_wrong = 0

[service]
max_rss_growth_mb = 50
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from loadtests.resources import ResourceUse
from loadtests.run_profile import Strict, checked, read_file
from loadtests.samples import MEASURES, Outcome, Sample, by_group, duration_s, percentile, values_of

SLOS = Path(__file__).resolve().parent / "objectives"
PERCENTILE = re.compile(r"p(100|[1-9]\d?(?:\.\d+)?)")


def _are_percentiles(limits: dict[str, float]) -> dict[str, float]:
    for name in limits:
        if not PERCENTILE.fullmatch(name):
            raise ValueError(f"{name} is no percentile; p50, p99 and p99.9 are")
    return limits


Percentiles = Annotated[dict[str, PositiveFloat], AfterValidator(_are_percentiles)]
NO_LIMITS: dict[str, float] = {}
Share = Annotated[float, Field(ge=0, le=1)]


class Objective(Strict):
    """Holds for the samples whose scenario and step fit, together. Measures without a limit are not judged, except
    `max_wrong`: a wrong text is never fine. Latencies are those of requests that were answered.
    """

    scenario: str = "*"
    step: str = "*"
    min_requests: PositiveInt = 1  # fewer, and nothing was tested
    ttft_ms: Percentiles = NO_LIMITS
    itl_ms: Percentiles = NO_LIMITS
    e2e_ms: Percentiles = NO_LIMITS
    tokens_per_s: Percentiles = NO_LIMITS
    rejection_ms: Percentiles = NO_LIMITS  # until a refusal is there
    lag_ms: Percentiles = NO_LIMITS  # of the client: beyond that the figures are its own
    max_wrong: NonNegativeInt = 0
    max_failed_share: Share | None = None  # failed or unfinished
    max_rejected_share: Share | None = None
    min_rejected: NonNegativeInt = 0  # an overload that is not refused was none, or was swallowed
    max_unexplained_rejections: NonNegativeInt = 0  # without Retry-After
    min_resumed_share: Share | None = None  # of prompt tokens
    min_output_tokens_per_s: PositiveFloat | None = None  # of all together
    # answered right and with each of these: TTFT and E2E in ms; at least `min_goodput` of them a second
    goodput_ttft_ms: PositiveFloat | None = None
    goodput_e2e_ms: PositiveFloat | None = None
    min_goodput: PositiveFloat | None = None


class ServiceObjective(Strict):
    """Limits for each server that the run started. Growth: median of the last quarter over that of the second."""

    max_rss_mb: PositiveFloat | None = None
    max_rss_rise_mb: NonNegativeFloat | None = None  # largest over the first reading
    max_rss_growth_mb: NonNegativeFloat | None = None
    max_fd_growth: NonNegativeInt | None = None
    max_connection_growth: NonNegativeInt | None = None
    max_fds_left: NonNegativeInt | None = None  # after the load, over those before it
    max_connections_left: NonNegativeInt | None = None


class Slo(Strict):
    objective: tuple[Objective, ...] = ()
    service: ServiceObjective = ServiceObjective()


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """One limit and its measured value. `measured` None: there was nothing to measure, which is a miss."""

    where: str
    what: str
    limit: float
    measured: float | None
    is_met: bool

    def __str__(self) -> str:
        measured = "nothing measured" if self.measured is None else f"{self.measured:.4g}"
        return f"{'met   ' if self.is_met else 'MISSED'} {self.where}: {self.what}: {measured} (limit {self.limit:g})"


def load_slo(source: str | Path) -> Slo:
    """A file, or the name of one in SLOS. Raises RunError."""
    path, fields = read_file("slo", source, SLOS)
    return checked(Slo, path, fields)


def judge(slo: Slo, samples: Sequence[Sample], use: Sequence[ResourceUse] = ()) -> list[Verdict]:
    """Every limit, in the order of the file."""
    verdicts: list[Verdict] = []
    for objective in slo.objective:
        fitting = [
            sample
            for (scenario, step), group in by_group(samples).items()
            if fnmatch.fnmatchcase(scenario, objective.scenario) and fnmatch.fnmatchcase(step, objective.step)
            for sample in group
        ]
        where = objective.scenario + ("" if objective.step == "*" else f" at {objective.step}")
        verdicts += _judge_group(objective, where, fitting)
    for server in use:
        verdicts += _judge_server(slo.service, server)
    return verdicts


def at_most(where: str, what: str, limit: float, measured: float | None) -> Verdict:
    return Verdict(where, what, limit, measured, measured is not None and measured <= limit)


def at_least(where: str, what: str, limit: float, measured: float | None) -> Verdict:
    return Verdict(where, what, limit, measured, measured is not None and measured >= limit)


def _judge_group(objective: Objective, where: str, samples: list[Sample]) -> Iterator[Verdict]:
    yield at_least(where, "requests", objective.min_requests, len(samples))
    yield from _judge_times(objective, where, samples)
    yield at_most(where, "wrong answers", objective.max_wrong, _count(samples, "wrong"))
    yield from _judge_refusals(objective, where, samples)
    yield from _judge_rates(objective, where, samples)


def _judge_times(objective: Objective, where: str, samples: list[Sample]) -> Iterator[Verdict]:
    answered = [sample for sample in samples if sample.outcome in ("ok", "wrong")]
    values = {measure: values_of(answered, measure) for measure in MEASURES}
    values["rejection_ms"] = [sample.e2e_ms or 0.0 for sample in samples if sample.outcome == "rejected"]
    values["lag_ms"] = [sample.lag_ms for sample in samples]
    for measure, found in values.items():
        limits: dict[str, float] = getattr(objective, measure)
        judge_one = at_least if measure == "tokens_per_s" else at_most
        for name, limit in limits.items():
            yield judge_one(where, f"{measure} {name}", limit, percentile(found, float(name[1:]) / 100))


def _judge_refusals(objective: Objective, where: str, samples: list[Sample]) -> Iterator[Verdict]:
    total = len(samples) or 1
    rejected = [sample for sample in samples if sample.outcome == "rejected"]
    unexplained = sum(sample.retry_after_s is None for sample in samples if sample.outcome in ("rejected", "busy"))
    yield at_most(where, "refusals without Retry-After", objective.max_unexplained_rejections, unexplained)
    if objective.max_failed_share is not None:
        failed = (_count(samples, "failed") + _count(samples, "unfinished")) / total
        yield at_most(where, "share of failures", objective.max_failed_share, failed)
    if objective.max_rejected_share is not None:
        yield at_most(where, "share of refusals", objective.max_rejected_share, len(rejected) / total)
    if objective.min_rejected:
        yield at_least(where, "refusals", objective.min_rejected, len(rejected))


def _judge_rates(objective: Objective, where: str, samples: list[Sample]) -> Iterator[Verdict]:
    seconds = duration_s(samples) or 1.0
    if objective.min_resumed_share is not None:
        resumed = sum(sample.resumed_tokens for sample in samples)
        total = sum(sample.prompt_tokens for sample in samples) or 1
        yield at_least(where, "share of resumed tokens", objective.min_resumed_share, resumed / total)
    if objective.min_output_tokens_per_s is not None:
        tokens = sum(sample.tokens for sample in samples)
        yield at_least(where, "output tokens/s", objective.min_output_tokens_per_s, tokens / seconds)
    if objective.min_goodput is not None:
        good = sum(_is_good(objective, sample) for sample in samples)
        yield at_least(where, "goodput, requests/s", objective.min_goodput, good / seconds)


def _is_good(objective: Objective, sample: Sample) -> bool:
    limits = ((sample.ttft_ms, objective.goodput_ttft_ms), (sample.e2e_ms, objective.goodput_e2e_ms))
    return sample.outcome == "ok" and all(
        limit is None or (value is not None and value <= limit) for value, limit in limits
    )


def _judge_server(objective: ServiceObjective, use: ResourceUse) -> Iterator[Verdict]:
    measured = {
        "max_rss_mb": ("largest RSS, MB", use.max_rss_mb),
        "max_rss_rise_mb": ("rise of RSS, MB", use.rss_rise_mb),
        "max_rss_growth_mb": ("growth of RSS, MB", use.growth("rss_mb")),
        "max_fd_growth": ("growth in file descriptors", use.growth("fds")),
        "max_connection_growth": ("growth in connections", use.growth("connections")),
        "max_fds_left": ("file descriptors left open", use.left("fds")),
        "max_connections_left": ("connections left open", use.left("connections")),
    }
    for name, (what, value) in measured.items():
        limit = getattr(objective, name)
        if limit is not None:
            yield at_most(use.name, what, limit, value)


def _count(samples: Sequence[Sample], outcome: Outcome) -> int:
    return sum(sample.outcome == outcome for sample in samples)
