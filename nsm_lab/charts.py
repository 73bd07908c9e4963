"""Line charts as SVG: a figure by length, size or position."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

SIZE = (7.6, 4.4)  # inches
# Okabe and Ito's colours, which colour-blind readers tell apart too
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """One curve: points (x, y), x above 0 and ascending."""

    label: str
    points: tuple[tuple[float, float], ...]


def line_chart(
    lines: Sequence[Line],
    *,
    x_ticks: Sequence[tuple[float, str]],
    x_label: str,
    y_label: str,
    y_low: float | None = None,
) -> str:
    """The SVG text of `line_figure` with the same arguments."""
    figure = line_figure(lines, x_ticks=x_ticks, x_label=x_label, y_label=y_label, y_low=y_low)
    text = io.StringIO()
    # Text stays text, and equal charts have equal bytes
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "nsm-serve"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def line_figure(
    lines: Sequence[Line],
    *,
    x_ticks: Sequence[tuple[float, str]],
    x_label: str,
    y_label: str,
    y_low: float | None = None,
) -> Figure:
    """Curves over a logarithmic x axis with the given ticks: values and their labels. `y_low`: where the y axis begins.

    A line without points is in the legend only.
    """
    figure = Figure(figsize=SIZE, layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    axes.set_prop_cycle(color=COLOURS)
    for line in lines:
        # `$` would begin a formula
        axes.plot(*_columns(line), marker="o", markersize=4, label=line.label.replace("$", r"\$"))
    axes.set_xscale("log", base=2)
    axes.set_xticks([x for x, _ in x_ticks], [label for _, label in x_ticks], minor=False)
    axes.minorticks_off()
    axes.set(xlabel=x_label, ylabel=y_label)
    if y_low is not None:
        axes.set_ylim(bottom=y_low)
    axes.grid(axis="y", color="#dddddd")
    axes.legend()
    return figure


def _columns(line: Line) -> tuple[list[float], list[float]]:
    return [x for x, _ in line.points], [y for _, y in line.points]
