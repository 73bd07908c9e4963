"""The figure and its table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nsm_lab.charts import Line, line_chart
from nsm_lab.evaluation.markdown import table
from nsm_lab.evaluation.recall_size.points import CURVES

Results = Sequence[Mapping[str, Any]]


def markdown(results: Results, rates: Mapping[str, float]) -> str:
    """A row a layer and size: means over seeds at the layer's rate, their range, and what Zoology's figure shows."""
    rows = []
    for curve in CURVES:
        for size in sorted({result["run"]["size"] for result in results if result["run"]["curve"] == curve}):
            runs = points(results, rates, curve, size)
            if runs:
                rows.append(_row(curve, size, runs, rates[curve]))
    heads = ("layers", "numbers of state", "mean", "range", "1,024 tokens, 256 pairs", "rate", "seeds", "passes",
             "Zoology's figure")  # fmt: skip
    return table(heads, rows)


def points(results: Results, rates: Mapping[str, float], curve: str, size: int) -> list[Mapping[str, Any]]:
    """The results of one point of the figure, of all seeds."""
    wanted = (curve, size, rates.get(curve))
    return [result for result in results if tuple(result["run"][name] for name in ("curve", "size", "lr")) == wanted]


def _row(curve: str, size: int, runs: Results, rate: float) -> list[str]:
    means = [float(result["mean"]) for result in runs]
    longest = [float(result["accuracies"][-1][-1]) for result in runs]
    near = [f"{accuracy:.2f}" for state, accuracy in CURVES[curve].published if abs(state / size - 1) < 0.1]
    passes = sorted({int(result["epochs_run"]) for result in runs})
    return [
        CURVES[curve].title, f"{size:,}", f"{sum(means) / len(means):.3f}", f"{min(means):.3f}–{max(means):.3f}",
        f"{sum(longest) / len(longest):.3f}", f"{rate:g}", str(len(runs)), "–".join(map(str, passes)),
        near[0] if near else "",
    ]  # fmt: skip


def figure(results: Results, rates: Mapping[str, float]) -> str:
    """The SVG: mean accuracy by numbers of state, one curve a layer; the mean over seeds."""
    sizes = sorted({int(result["run"]["size"]) for result in results})
    lines = []
    for curve, details in CURVES.items():
        found = [(size, points(results, rates, curve, size)) for size in sizes]
        means = [(float(size), sum(float(run["mean"]) for run in runs) / len(runs)) for size, runs in found if runs]
        if means:
            lines.append(Line(details.title, tuple(means)))
    return line_chart(
        lines,
        x_ticks=[(size, f"{size:,}") for size in sizes],
        x_label="numbers of state",
        y_label="recall, mean over the test tasks",
        y_low=0.0,
    )
