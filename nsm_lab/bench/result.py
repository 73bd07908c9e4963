"""The result of one benchmark run, as a value and as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from nsm_core.errors import ConfigError

FORMAT = "nsm-bench/1"
Better = Literal["less", "more"]
# Ending of a measure's name -> its unit, and whether less or more is better
UNITS: tuple[tuple[str, str, Better], ...] = (
    ("tokens_per_s", "tokens/s", "more"),
    ("tokens_per_cpu_s", "tokens/CPU s", "more"),
    ("speedup", "times", "more"),
    ("_ms", "ms", "less"),
    ("_mb", "MiB", "less"),
    ("ratio", "times", "less"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Measure:
    """A number measured once in each repeat. `name`: workload.size.figure, e.g. `decode.8.tokens_per_s`."""

    name: str
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        if len(self.name.split(".")) != 3:
            raise ConfigError(f"a measure's name has three parts, got {self.name!r}")
        if not self.values or not all(math.isfinite(value) and value >= 0 for value in self.values):
            raise ConfigError(f"{self.name} must have finite values of at least 0, got {list(self.values)}")
        unit_of(self.name)

    @property
    def unit(self) -> str:
        return unit_of(self.name)[0]

    @property
    def better(self) -> Better:
        return unit_of(self.name)[1]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Between them lies the middle half of the values."""
        ordered = sorted(self.values)
        return quantile(ordered, 0.25), quantile(ordered, 0.75)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """Measures with their context: the command, the machine and the measured subject.

    `subject`: the model or server that was measured; `machine`: see `nsm_lab.bench.machine`.
    """

    kind: str
    command: str
    commit: str | None
    created: str  # UTC
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    subject: Mapping[str, Any]
    options: Mapping[str, Any]
    measures: tuple[Measure, ...]

    def by_name(self) -> dict[str, Measure]:
        return {measure.name: measure for measure in self.measures}

    def to_json(self) -> str:
        fields = dataclasses.asdict(self)
        fields["measures"] = [
            {"name": measure.name, "unit": measure.unit, "better": measure.better, "values": list(measure.values)}
            for measure in self.measures
        ]
        return json.dumps({"format": FORMAT, **fields}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> BenchResult:
        """The inverse of `to_json`. Raises ConfigError for any other text."""
        try:
            fields = json.loads(text)
            if fields.pop("format") != FORMAT:
                raise ConfigError(f"not a result of this format, {FORMAT}")
            measures = fields.pop("measures")
            read = tuple(Measure(item["name"], tuple(map(float, item["values"]))) for item in measures)
            return cls(**fields, measures=read)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"not a benchmark's result: {type(error).__name__}: {error}") from error


def read_result(path: Path) -> BenchResult:
    """Raises ConfigError with the file's name, or OSError."""
    try:
        return BenchResult.from_json(path.read_text("utf-8"))
    except (ConfigError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error


def unit_of(name: str) -> tuple[str, Better]:
    """Unit of a measure, and whether more or less is better. Raises ConfigError for an unknown ending."""
    for ending, unit, better in UNITS:
        if name.endswith(ending):
            return unit, better
    raise ConfigError(f"the unit of {name} is not known")


def collect(repeats: Iterable[Mapping[str, float]]) -> tuple[Measure, ...]:
    """Measures from the figures of all repeats, grouped by workload and size, in order of first appearance."""
    values: dict[str, list[float]] = {}
    for figures in repeats:
        for name, value in figures.items():
            values.setdefault(name, []).append(value)
    groups: dict[str, dict[str, list[Measure]]] = {}
    for name, series in values.items():
        measure = Measure(name, tuple(series))
        workload, size, _ = name.split(".")
        groups.setdefault(workload, {}).setdefault(size, []).append(measure)
    return tuple(measure for sizes in groups.values() for group in sizes.values() for measure in group)


def quantile(ordered: list[float], share: float) -> float:
    """Quantile of ascending values, interpolated linearly. Raises ValueError if there are none."""
    if not ordered:
        raise ValueError("no values")
    index = share * (len(ordered) - 1)
    low = math.floor(index)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (index - low)
