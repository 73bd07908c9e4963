"""What the states of several models hold, side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from nsm_lab.evaluation.history.estimates import Estimate
from nsm_lab.evaluation.history.measure import HistoryResult
from nsm_lab.evaluation.history.section import NOT_FOUND
from nsm_lab.evaluation.markdown import short, table

Row = TypeVar("Row", int, tuple[int, int])
# Of one model, by row: the estimate, whether it is beyond the windows, and what a model without memory gets.
Cells = Mapping[Row, tuple[Estimate, bool, float]]


def comparison_lines(results: Mapping[str, HistoryResult]) -> str:
    """A table for each measurement, with a column for each model; a measurement without any model is left out."""
    reaches = ", ".join(f"{label} {result.reach:,}" for label, result in results.items())
    tables = (
        ("Text: gain over a fresh start so many tokens before the span, nats a token", _distances(results, _text)),
        ("Gain on a passage read so many tokens before, nats a token", _distances(results, _passages)),
        ("Key, so many tokens from the end: share that are the likeliest of ten", _contexts(results, "is_likeliest")),
        ("Key, so many tokens from the end: share that are written out", _contexts(results, "is_written")),
    )
    return "\n\n".join(
        [
            f"Means with 95 % intervals over documents; {NOT_FOUND}: the interval includes what a model without memory "
            f"gets. * Beyond the model's attention windows, which reach so many tokens: {reaches}.",
            *(f"## {title}\n\n{lines}" for title, lines in tables if lines),
        ]
    )


def _text(result: HistoryResult) -> Cells[int]:
    found = result.fresh_starts.starts if result.fresh_starts else ()
    return {one.start: (one.gain, one.is_beyond_windows, 0.0) for one in found}


def _passages(result: HistoryResult) -> Cells[int]:
    found = result.repeats.distances if result.repeats else ()
    return {one.distance: (one.gain, one.is_beyond_windows, 0.0) for one in found}


def _distances(results: Mapping[str, HistoryResult], cells: Callable[[HistoryResult], Cells[int]]) -> str:
    columns = {label: cells(result) for label, result in results.items()}
    rows = sorted({row for column in columns.values() for row in column})
    lines = [[f"{row:,}", *(_cell(column, row, "+.4f") for column in columns.values())] for row in rows]
    return table(("tokens", *columns), lines) if rows else ""


def _contexts(results: Mapping[str, HistoryResult], share: str) -> str:
    columns: dict[str, Cells[tuple[int, int]]] = {}
    for label, result in results.items():
        chance = result.keys.chance if result.keys and share == "is_likeliest" else 0.0
        found = result.keys.cells if result.keys else ()
        columns[label] = {
            (cell.context, cell.distance): (getattr(cell, share), cell.is_beyond_windows, chance) for cell in found
        }
    rows = sorted({row for column in columns.values() for row in column})
    lines = [
        [short(row[0]), f"{row[1]:,}", *(_cell(column, row, ".0%") for column in columns.values())] for row in rows
    ]
    return table(("context", "tokens", *columns), lines) if rows else ""


def _cell(column: Cells[Row], row: Row, style: str) -> str:
    if row not in column:
        return "–"
    estimate, is_beyond, chance = column[row]
    shown = f"{estimate.mean:{style}}{' *' if is_beyond else ''}"
    if estimate.low is not None and estimate.high is not None:
        shown += f" ({estimate.low:{style}} … {estimate.high:{style}})"
    return shown if estimate.exceeds(chance) else f"{shown} {NOT_FOUND}"
