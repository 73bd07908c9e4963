"""The measurements of history as one picture: three charts over distance."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from nsm_lab.charts import COLOURS
from nsm_lab.evaluation.history.estimates import Estimate
from nsm_lab.evaluation.history.keys import KeyCell
from nsm_lab.evaluation.history.measure import HistoryResult
from nsm_lab.evaluation.markdown import short

SIZE = (15.0, 4.2)  # inches
Points = Sequence[tuple[int, Estimate]]


def history_curves(results: Mapping[str, HistoryResult]) -> str:
    """An SVG with a line for each model in `results`, by their labels, and for keys one for each context.

    Bars are 95 % intervals. Shaded: what the attention layers of the first model reach.
    """
    text = io.StringIO()
    # text stays text, and equal charts have equal bytes
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "nsm-serve"}):
        _figure(results).savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def _figure(results: Mapping[str, HistoryResult]) -> Figure:
    figure = Figure(figsize=SIZE, layout="constrained")
    FigureCanvasSVG(figure)
    text, passage, keys = figure.subplots(1, 3)
    for axes in (text, passage, keys):
        axes.set_prop_cycle(color=COLOURS)
    for label, result in results.items():
        if result.fresh_starts:
            _line(text, [(one.start, one.gain) for one in result.fresh_starts.starts], label)
        if result.repeats:
            _line(passage, [(one.distance, one.gain) for one in result.repeats.distances], label)
        if result.keys:
            for context, cells in _by_context(result.keys.cells).items():
                points = [(cell.distance, cell.is_likeliest) for cell in cells]
                _line(keys, points, f"{label}, {short(context)}")
            keys.axhline(result.keys.chance, color="grey", linewidth=0.8, linestyle=":")
    reach = next(iter(results.values())).reach
    _finish(text, reach, "text: gain over a fresh start", "tokens from the fresh start to the span", "nats a token")
    _finish(passage, reach, "a passage read before: gain", "tokens back", "nats a token")
    _finish(keys, reach, "key: likeliest of ten", "tokens from the end", "share of prompts")
    return figure


def _by_context(cells: Sequence[KeyCell]) -> dict[int, list[KeyCell]]:
    contexts = sorted({cell.context for cell in cells})
    return {context: [cell for cell in cells if cell.context == context] for context in contexts}


def _line(axes: Any, points: Points, label: str) -> None:
    """Means with their intervals as error bars."""
    means = [one.mean for _, one in points]
    below = [0.0 if one.low is None else one.mean - one.low for _, one in points]
    above = [0.0 if one.high is None else one.high - one.mean for _, one in points]
    distances = [distance for distance, _ in points]
    # `$` would begin a formula
    shown = label.replace("$", r"\$")
    axes.errorbar(distances, means, yerr=(below, above), marker="o", markersize=3, capsize=2, label=shown)


def _finish(axes: Any, reach: int, title: str, x_label: str, y_label: str) -> None:
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    if not axes.containers:
        return
    axes.set_xscale("log", base=2)
    axes.axhline(0.0, color="black", linewidth=0.6)
    left, right = axes.get_xlim()
    if reach:
        axes.axvspan(left, reach, color="0.93", zorder=0)
        axes.axvline(reach, color="grey", linewidth=0.8, linestyle="--")
    axes.set_xlim(left, max(right, reach))
    axes.xaxis.set_major_formatter(lambda tokens, _: short(round(tokens)))
    axes.legend(fontsize=7)
