"""Pictures of a run."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")  # no screen

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtests.resources import ResourceUse
from loadtests.samples import OUTCOMES, Outcome, Sample, by_group, percentile, values_of

SIZE = (8.0, 4.0)  # inches
DPI = 110
COLORS: dict[Outcome, str] = {
    "ok": "tab:green",
    "wrong": "tab:red",
    "rejected": "tab:orange",
    "busy": "tab:olive",
    "cancelled": "tab:gray",
    "failed": "tab:purple",
    "unfinished": "tab:brown",
}


def draw_all(samples: Sequence[Sample], use: Sequence[ResourceUse], directory: Path) -> list[Path]:
    """PNG files in `directory`; those for which there is no data are left out."""
    drawn = [draw_throughput(samples, directory / "throughput.png"), draw_latencies(samples, directory / "latency.png")]
    if any(sample.step and sample.scenario in ("arrival", "turn") for sample in samples):
        drawn.append(draw_load_curve(samples, directory / "latency-load.png"))
    if any(server.readings for server in use):
        drawn.append(draw_resources(use, directory / "resources.png"))
    return drawn


def draw_throughput(samples: Sequence[Sample], path: Path) -> Path:
    """Requests by how they ended and tokens written, for each second."""
    start_s = min(sample.intended_s for sample in samples)
    figure, (left, right) = plt.subplots(1, 2, figsize=SIZE, layout="constrained")
    for outcome in OUTCOMES:
        ends = Counter(int(sample.end_s - start_s) for sample in samples if sample.outcome == outcome)
        if ends:
            seconds = range(max(ends) + 1)
            left.plot(seconds, [ends[second] for second in seconds], label=outcome, color=COLORS[outcome])
    tokens: Counter[int] = Counter()
    for sample in samples:
        tokens[int(sample.end_s - start_s)] += sample.tokens
    right.plot(range(max(tokens) + 1), [tokens[second] for second in range(max(tokens) + 1)])
    _label(left, "answers", "s", "1/s")
    _label(right, "tokens of answers that ended", "s", "tokens/s")
    left.legend()
    return _save(figure, path)


def draw_latencies(samples: Sequence[Sample], path: Path) -> Path:
    """For each scenario the share of answers that were as fast."""
    figure, axes = plt.subplots(1, 3, figsize=(12.0, 5.0), layout="constrained")
    groups: dict[str, list[Sample]] = {}
    for (scenario, _), group in by_group(samples).items():
        groups.setdefault(scenario, []).extend(sample for sample in group if sample.outcome == "ok")
    shown = {scenario: group for scenario, group in groups.items() if values_of(group, "ttft_ms")}
    for ax, measure in zip(axes, ("ttft_ms", "itl_ms", "e2e_ms"), strict=True):
        for color, (scenario, group) in zip(itertools.cycle(mpl.color_sequences["tab20"]), shown.items(), strict=False):
            values = sorted(value for value in values_of(group, measure) if value > 0)
            shares = [(index + 1) / len(values) for index in range(len(values))]
            ax.step(values, shares, where="post", label=scenario, color=color)
        ax.set_xscale("log")
        _label(ax, measure.removesuffix("_ms").upper(), "ms", "share of values up to")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize="small")
    return _save(figure, path)


def draw_load_curve(samples: Sequence[Sample], path: Path) -> Path:
    """Each step of the open loop is a point: the offered rate, against the rate done and its latency."""
    figure, (left, right) = plt.subplots(1, 2, figsize=SIZE, layout="constrained")
    points = sorted(((offered_rate(group), group) for group in steps_of(samples)), key=lambda point: point[0])
    offered = [rate for rate, _ in points]
    left.plot(offered, offered, color="lightgray", label="offered")
    for outcome in ("ok", "rejected"):
        rates = [rate * _share(group, outcome) for rate, group in points]
        left.plot(offered, rates, marker="o", color=COLORS[outcome], label=outcome)
    for measure, share in (("ttft_ms", 0.5), ("ttft_ms", 0.99), ("e2e_ms", 0.5), ("e2e_ms", 0.99)):
        good = [[sample for sample in group if sample.outcome == "ok"] for _, group in points]
        values = [percentile(values_of(group, measure), share) for group in good]
        label = f"{measure.removesuffix('_ms').upper()} p{share * 100:g}"
        right.plot(offered, [float("nan") if value is None else value for value in values], marker="o", label=label)
    right.set_yscale("log")
    _label(left, "throughput against load", "offered, requests/s", "requests/s")
    _label(right, "latency from the intended start", "offered, requests/s", "ms")
    left.legend()
    right.legend(fontsize="small")
    return _save(figure, path)


def draw_resources(use: Sequence[ResourceUse], path: Path) -> Path:
    figure, axes = plt.subplots(1, 3, figsize=(12.0, 4.0), layout="constrained")
    for server in use:
        start_s = server.readings[0].at_s if server.readings else 0.0
        seconds = [reading.at_s - start_s for reading in server.readings]
        for ax, field in zip(axes, ("rss_mb", "fds", "connections"), strict=True):
            ax.plot(seconds, [getattr(reading, field) for reading in server.readings], label=server.name)
    for ax, name in zip(axes, ("RSS, MB", "file descriptors", "connections"), strict=True):
        _label(ax, name, "s", "")
        ax.set_ylim(bottom=0, top=ax.get_ylim()[1] * 1.05)
    axes[0].legend(fontsize="small")
    return _save(figure, path)


def steps_of(samples: Sequence[Sample]) -> list[list[Sample]]:
    """The samples of each step of the open loop."""
    groups = by_group(sample for sample in samples if sample.scenario in ("arrival", "turn"))
    return list(groups.values())


def offered_rate(samples: Sequence[Sample]) -> float:
    """Requests a second over the time in which they should have been sent."""
    starts = [sample.intended_s for sample in samples]
    span_s = max(starts) - min(starts)
    return (len(starts) - 1) / span_s if span_s else float(len(starts))


def _share(samples: Sequence[Sample], outcome: str) -> float:
    return sum(sample.outcome == outcome for sample in samples) / len(samples)


def _label(ax: Axes, title: str, x: str, y: str) -> None:
    ax.set_title(title, fontsize="medium")
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    ax.grid(alpha=0.3)


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=DPI)
    plt.close(figure)
    return path
