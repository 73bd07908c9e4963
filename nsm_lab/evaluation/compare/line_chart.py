"""A line chart as SVG, for the loss by position of several models."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Sequence

WIDTH, HEIGHT = 760, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 30, 50
_LEGEND_LINE = 18
# Okabe and Ito's colours, told apart by colour-blind readers too.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_NUM_Y_TICKS = 6


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """One curve: points (x, y), x above 0 and ascending."""

    label: str
    points: tuple[tuple[float, float], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Scale:
    """From values to places in the picture; x is logarithmic."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]

    def x(self, value: float) -> float:
        low, high = (math.log2(bound) for bound in self.x_range)
        return _LEFT + (math.log2(value) - low) / ((high - low) or 1.0) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return HEIGHT - _BOTTOM - (value - low) / ((high - low) or 1.0) * (HEIGHT - _TOP - _BOTTOM)


def line_chart(lines: Sequence[Line], *, x_ticks: Sequence[tuple[float, str]], x_label: str, y_label: str) -> str:
    """The picture as one SVG text. `x_ticks`: places and their labels. A line without points is in the legend only."""
    xs = [x for line in lines for x, _ in line.points] + [x for x, _ in x_ticks]
    ys = [y for line in lines for _, y in line.points] or [0.0]
    margin = 0.05 * (max(ys) - min(ys)) or 0.1
    scale = _Scale((min(xs), max(xs)), (min(ys) - margin, max(ys) + margin))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        *_y_axis(scale, y_label),
        *_x_axis(scale, x_ticks, x_label),
        *(part for number, line in enumerate(lines) for part in _curve(scale, number, line)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _y_axis(scale: _Scale, label: str) -> list[str]:
    low, high = scale.y_range
    values = [low + (high - low) * tick / (_NUM_Y_TICKS - 1) for tick in range(_NUM_Y_TICKS)]
    parts = [_text(14, HEIGHT / 2, label, anchor="middle", rotated=True)]
    for value in values:
        y = scale.y(value)
        parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{WIDTH - _RIGHT}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(_text(_LEFT - 6, y + 4, f"{value:.3f}", anchor="end"))
    return parts


def _x_axis(scale: _Scale, ticks: Sequence[tuple[float, str]], label: str) -> list[str]:
    bottom = HEIGHT - _BOTTOM
    parts = [_text((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 10, label, anchor="middle")]
    for value, name in ticks:
        x = scale.x(value)
        parts.append(f'<line x1="{x:.1f}" y1="{bottom}" x2="{x:.1f}" y2="{bottom + 5}" stroke="black"/>')
        parts.append(_text(x, bottom + 18, name, anchor="middle"))
    return parts


def _curve(scale: _Scale, number: int, line: Line) -> list[str]:
    colour = _COLOURS[number % len(_COLOURS)]
    places = [(scale.x(x), scale.y(y)) for x, y in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    y = _TOP + _LEGEND_LINE * number
    return [
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>',
        *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places),
        f'<line x1="{WIDTH - 230}" y1="{y - 4}" x2="{WIDTH - 206}" y2="{y - 4}" stroke="{colour}" stroke-width="3"/>',
        _text(WIDTH - 200, y, line.label),
    ]


def _text(x: float, y: float, text: str, *, anchor: str = "start", rotated: bool = False) -> str:
    turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if rotated else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{turn}>{html.escape(text)}</text>'
