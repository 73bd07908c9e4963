"""The measurements of history as one picture of three curves over distance. Needs matplotlib, the extra `inspect`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nsm_core.errors import ConfigError
from nsm_lab.evaluation.history.estimates import Estimate
from nsm_lab.evaluation.history.keys import KeyCell
from nsm_lab.evaluation.history.measure import HistoryResult
from nsm_lab.evaluation.markdown import short

Points = Sequence[tuple[int, Estimate]]


def draw_history(results: Mapping[str, HistoryResult], path: Path) -> None:
    """Writes an SVG or a PNG, by the name's end, with a line for each model in `results`.

    The shaded side of a dashed line is what the attention layers of the first model reach. Raises ConfigError without
    matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigError("curves need matplotlib: pip install 'nsm-serve[inspect]'") from error
    figure = Figure(figsize=(15, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    text, passage, keys = figure.subplots(1, 3)
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
    _finish(text, results, "text: gain over a fresh start", "tokens from the fresh start", "nats a token")
    _finish(passage, results, "a passage read before: gain", "tokens back", "nats a token")
    _finish(keys, results, "key: likeliest of ten", "tokens from the end", "share of prompts")
    # without the date, equal results are equal files
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _by_context(cells: Sequence[KeyCell]) -> dict[int, list[KeyCell]]:
    contexts = sorted({cell.context for cell in cells})
    return {context: [cell for cell in cells if cell.context == context] for context in contexts}


def _line(axes: Any, points: Points, label: str) -> None:
    """Means with their intervals as error bars."""
    means = [one.mean for _, one in points]
    below = [0.0 if one.low is None else one.mean - one.low for _, one in points]
    above = [0.0 if one.high is None else one.high - one.mean for _, one in points]
    axes.errorbar([x for x, _ in points], means, yerr=(below, above), marker="o", markersize=3, capsize=2, label=label)


def _finish(axes: Any, results: Mapping[str, HistoryResult], title: str, x_label: str, y_label: str) -> None:
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    if not axes.containers:
        return
    axes.set_xscale("log", base=2)
    axes.axhline(0.0, color="black", linewidth=0.6)
    left, right = axes.get_xlim()
    reach = next(iter(results.values())).reach
    if reach:
        axes.axvspan(left, reach, color="0.93", zorder=0)
        axes.axvline(reach, color="grey", linewidth=0.8, linestyle="--")
    axes.set_xlim(left, max(right, reach))
    axes.xaxis.set_major_formatter(lambda tokens, _: short(round(tokens)))
    axes.legend(fontsize=7)
