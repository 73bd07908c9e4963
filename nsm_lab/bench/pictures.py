"""Draws results: one SVG for each kind of figure, with sizes on the x axis."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from nsm_lab.bench.result import BenchResult, Measure
from nsm_lab.charts import Line, line_chart

X_LABELS: Mapping[str, str] = {
    "decode": "requests at once",
    "stream": "clients at once",
    "prefill": "length of the prompt",
    "session": "length of the session",
    "conversation": "length of the conversation",
}


def draw(results: Mapping[str, BenchResult], directory: Path) -> list[Path]:
    """One file for each figure that changes with a size; each result is a line of its medians. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    files = []
    for workload, figure in _figures(results.values()):
        lines = [Line(label, _points(result, workload, figure)) for label, result in results.items()]
        sizes = sorted({x for line in lines for x, _ in line.points})
        if len(sizes) < 2:
            continue
        unit = next(measure.unit for result in results.values() for measure in _of(result, workload, figure))
        picture = line_chart(
            lines,
            x_ticks=[(size, f"{size:g}") for size in sizes],
            x_label=X_LABELS[workload],
            y_label=f"{figure.replace('_', ' ')} ({unit})",
        )
        file = directory / f"{workload}-{figure}.svg"
        file.write_text(picture, "utf-8")
        files.append(file)
    return files


def _figures(results: Iterable[BenchResult]) -> list[tuple[str, str]]:
    kinds: dict[tuple[str, str], None] = {}
    for result in results:
        for measure in result.measures:
            workload, _, figure = measure.name.split(".")
            if workload in X_LABELS:
                kinds[workload, figure] = None
    return list(kinds)


def _of(result: BenchResult, workload: str, figure: str) -> list[Measure]:
    parts = ((measure, measure.name.split(".")) for measure in result.measures)
    return [measure for measure, (first, _, last) in parts if (first, last) == (workload, figure)]


def _points(result: BenchResult, workload: str, figure: str) -> tuple[tuple[float, float], ...]:
    return tuple(
        sorted((float(measure.name.split(".")[1]), measure.median) for measure in _of(result, workload, figure))
    )
