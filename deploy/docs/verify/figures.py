"""Figures of the pages against the results that they are from: `figures.toml` names both places."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FIGURES = Path(__file__).with_name("figures.toml")


@dataclasses.dataclass(frozen=True, slots=True)
class Figure:
    """`quote`: a regular expression over the page whose groups are figures; `source`: for each of them one over the
    results, whose groups add up to it. `tolerance`: by how much of itself a figure may differ, for rounding.
    """

    page: str
    quote: str
    results: str
    source: tuple[str, ...]
    tolerance: float = 0.02


def read_figures(path: Path = FIGURES) -> list[Figure]:
    entries = tomllib.loads(path.read_text("utf-8"))["figure"]
    return [Figure(**{**entry, "source": tuple(entry["source"])}) for entry in entries]


def stale_figures(figures: list[Figure], root: Path = ROOT) -> Iterator[str]:
    """One line for each entry whose figures are not what the results say."""
    for figure in figures:
        quoted = _numbers(root / figure.page, figure.quote)
        found = [_numbers(root / figure.results, pattern) for pattern in figure.source]
        if not quoted:
            yield f"{figure.page}: nothing fits {figure.quote!r}"
            continue
        missing = [pattern for pattern, numbers in zip(figure.source, found, strict=True) if not numbers]
        if missing:
            yield f"{figure.results}: nothing fits {missing[0]!r}"
            continue
        measured = [sum(numbers) for numbers in found]
        pairs = zip(quoted, measured, strict=True)
        if any(abs(ours - theirs) > figure.tolerance * abs(theirs) for ours, theirs in pairs):
            yield f"{figure.page}: {_shown(quoted)}, but {figure.results} has {_shown(measured)}"


def _numbers(path: Path, pattern: str) -> list[float]:
    """Empty where nothing fits."""
    found = re.search(pattern, path.read_text("utf-8"), re.DOTALL) if path.exists() else None
    return [float(group.replace(",", "")) for group in found.groups()] if found else []


def _shown(numbers: list[float]) -> str:
    return " / ".join(f"{number:.4g}" for number in numbers)
