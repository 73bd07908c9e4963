"""Draws what every panel of a dashboard would ask a running Prometheus, where the panel lies."""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter
from PIL import Image

from deploy.grafana.expressions import targets

NUM_POINTS = 200  # of each series
MOST_SERIES = 12  # of a panel; the others are counted below it
UNIT_HEIGHT, UNIT_WIDTH = 0.28, 0.62  # inches for each row and column of Grafana's grid
NUM_COLOURS = 96  # of a picture's palette: a quarter of the bytes, and nobody sees it
PREFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ"))
BINARY = ((2.0**30, "Gi"), (2.0**20, "Mi"), (2.0**10, "Ki"), (1.0, ""))
COUNTED = ("short", "reqps", "ops")  # 0.25 of them, never 250 thousandths
UNITS = {"s": "s", "bytes": "B", "Bps": "B/s", "reqps": "/s", "ops": "/s", "watt": "W", "joule": "J"}


@dataclasses.dataclass(frozen=True, slots=True)
class Series:
    """Values [T] at `Period.times`; NaN where there is none."""

    name: str
    values: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True)
class Period:
    """What the pictures show, in Unix seconds, and who is asked."""

    client: httpx.Client
    start: float
    end: float
    window: str

    @property
    def times(self) -> np.ndarray:
        return np.linspace(self.start, self.end, NUM_POINTS)

    def ask(self, expr: str) -> list[tuple[dict[str, str], np.ndarray]]:
        """Labels and values of each series; raises RuntimeError with Prometheus's own words."""
        step = (self.end - self.start) / (NUM_POINTS - 1)
        query: dict[str, str | float] = {"query": expr, "start": self.start, "end": self.end, "step": step}
        answer = self.client.get("/api/v1/query_range", params=query).json()
        if answer["status"] != "success":
            raise RuntimeError(f"{expr}: {answer['error']}")
        return [(series["metric"], self._placed(series["values"], step)) for series in answer["data"]["result"]]

    def _placed(self, points: Sequence[tuple[float, str]], step: float) -> np.ndarray:
        values = np.full(NUM_POINTS, np.nan)
        for at, value in points:
            values[min(NUM_POINTS - 1, round((at - self.start) / step))] = float(value)
        return values


def draw_board(board: Mapping[str, Any], period: Period, path: Path) -> None:
    """One picture of all panels."""
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"])
    figure = Figure(figsize=(24 * UNIT_WIDTH, (height + 1) * UNIT_HEIGHT), dpi=96, facecolor="white")
    figure.text(0.01, 1 - 0.5 / (height + 1), board["title"], fontsize=13, weight="bold", va="center")
    for panel in board["panels"]:
        grid = panel["gridPos"]
        bottom = 1 - (grid["y"] + grid["h"] + 1) / (height + 1)
        if panel["type"] == "row":
            figure.text(0.01, bottom + 0.4 / (height + 1), panel["title"], fontsize=10, weight="bold", color="#555")
            continue
        left, unit = grid["x"] / 24, 1 / (height + 1)
        pad_below = 0.8 if grid["h"] < 8 else 2.6
        box = (left + 0.035, bottom + pad_below * unit, grid["w"] / 24 - 0.045, (grid["h"] - pad_below - 1.2) * unit)
        draw_panel(figure.add_axes(box), board, panel, period)
    figure.savefig(path)
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(NUM_COLOURS).save(path, optimize=True)


def draw_panel(axes: Axes, board: Mapping[str, Any], panel: Mapping[str, Any], period: Period) -> None:
    """By the panel's type. A panel without data says so, as in Grafana."""
    span = f"{round(period.end - period.start)}s"
    series = [
        Series(target.name(labels), values)
        for target in targets(board, panel, window=period.window, span=span)
        for labels, values in period.ask(target.expr)
        if not np.isnan(values).all()
    ]
    axes.set_title(panel["title"], fontsize=8, loc="left", pad=3)
    axes.tick_params(labelsize=6, length=2)
    for side in axes.spines.values():
        side.set_color("#ccc")
    if not series:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "No data", ha="center", va="center", color="#999", transform=axes.transAxes)
    elif panel["type"] == "stat":
        _draw_number(axes, panel, series[0])
    elif panel["type"] == "heatmap":
        _draw_heatmap(axes, panel, series, period)
    else:
        _draw_lines(axes, panel, series, period)


def _draw_number(axes: Axes, panel: Mapping[str, Any], series: Series) -> None:
    axes.set_axis_off()
    latest = series.values[~np.isnan(series.values)][-1]
    text = shown(latest, panel["fieldConfig"]["defaults"]["unit"])
    axes.text(0.0, 0.4, text, fontsize=17, va="center", color="#2b7a3d", transform=axes.transAxes)


def _draw_lines(axes: Axes, panel: Mapping[str, Any], series: Sequence[Series], period: Period) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    custom = defaults["custom"]
    times = _dates(period.times)
    largest = sorted(series, key=lambda one: -float(np.nanmean(one.values)))[:MOST_SERIES]
    names = [one.name for one in largest]
    if "stacking" in custom:
        axes.stackplot(times, [np.nan_to_num(one.values) for one in largest], labels=names, alpha=0.75)
    else:
        for one in largest:
            axes.plot(times, one.values, label=one.name, linewidth=1)
    if custom.get("scaleDistribution", {}).get("type") == "log":
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(bottom=0, top=defaults.get("max"))
    axes.set_xlim(times[0], times[-1])
    _label_axes(axes, defaults["unit"])
    left_out = len(series) - len(largest)
    if left_out:
        axes.plot([], [], " ", label=f"and {left_out} more")
    where = {"loc": "upper left", "bbox_to_anchor": (-0.02, -0.12), "ncols": 3 if max(map(len, names)) < 22 else 2}
    axes.legend(fontsize=6, frameon=False, handlelength=1, borderpad=0, **where)


def _draw_heatmap(axes: Axes, panel: Mapping[str, Any], series: Sequence[Series], period: Period) -> None:
    """Cumulative buckets become counts of each; the bounds stand where a bucket ends."""
    ordered = sorted(series, key=lambda one: float(one.name))
    cumulative = np.nan_to_num(np.stack([one.values for one in ordered]))
    counts = np.diff(cumulative, axis=0, prepend=0.0).clip(min=0.0)
    used = np.flatnonzero(counts.sum(axis=1))
    low, high = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, len(ordered))
    edges = _dates(np.linspace(period.start, period.end, NUM_POINTS + 1))
    axes.pcolormesh(edges, np.arange(low, high + 1) - 0.5, counts[low:high], cmap="Oranges", vmin=0.0)
    unit = panel["options"]["yAxis"]["unit"]
    axes.set_yticks(np.arange(low, high), [_bound(one.name, unit) for one in ordered[low:high]])
    _label_times(axes)


def _bound(name: str, unit: str) -> str:
    return "more" if math.isinf(float(name)) else f"≤ {shown(float(name), unit)}"


def _label_axes(axes: Axes, unit: str) -> None:
    axes.grid(color="#eee", linewidth=0.5)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value, unit)))
    _label_times(axes)


def _label_times(axes: Axes) -> None:
    locator = AutoDateLocator(minticks=3, maxticks=8)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator, show_offset=False))


def _dates(times: np.ndarray) -> list[datetime.datetime]:
    return [datetime.datetime.fromtimestamp(at, datetime.UTC) for at in times]


def shown(value: float, unit: str) -> str:
    """A number with its unit, for a person; `unit` is one of Grafana's."""
    if unit == "percentunit":
        return f"{value * 100:.3g} %"
    if value == 0 or (unit in COUNTED and abs(value) < 1):
        return f"{value:.3g} {UNITS.get(unit, '')}".strip()
    prefixes = BINARY if unit in ("bytes", "Bps") else PREFIXES
    factor, prefix = next((pair for pair in prefixes if abs(value) >= pair[0]), prefixes[-1])
    return f"{value / factor:.3g} {prefix}{UNITS.get(unit, '')}".strip()
