"""Results as pictures: one SVG for each kind of figure, sizes on the x axis."""

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
    for what, figure in _figures(results.values()):
        lines = [Line(label, _points(result, what, figure)) for label, result in results.items()]
        sizes = sorted({x for line in lines for x, _ in line.points})
        if len(sizes) < 2:
            continue
        unit = next(measure.unit for result in results.values() for measure in _of(result, what, figure))
        picture = line_chart(
            lines,
            x_ticks=[(size, f"{size:g}") for size in sizes],
            x_label=X_LABELS[what],
            y_label=f"{figure.replace('_', ' ')} ({unit})",
        )
        file = directory / f"{what}-{figure}.svg"
        file.write_text(picture, "utf-8")
        files.append(file)
    return files


def _figures(results: Iterable[BenchResult]) -> list[tuple[str, str]]:
    found: dict[tuple[str, str], None] = {}
    for result in results:
        for measure in result.measures:
            what, _, figure = measure.name.split(".")
            if what in X_LABELS:
                found[what, figure] = None
    return list(found)


def _of(result: BenchResult, what: str, figure: str) -> list[Measure]:
    parts = ((measure, measure.name.split(".")) for measure in result.measures)
    return [measure for measure, (first, _, last) in parts if (first, last) == (what, figure)]


def _points(result: BenchResult, what: str, figure: str) -> tuple[tuple[float, float], ...]:
    return tuple(sorted((float(measure.name.split(".")[1]), measure.median) for measure in _of(result, what, figure)))
