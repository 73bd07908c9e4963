"""Small pieces of Markdown that all reports share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table: the first column to the left, numbers to the right."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def rate(value: float | None, digits: int) -> str:
    """A number, or a dash where there is none."""
    return "–" if value is None else f"{value:,.{digits}f}"


def position_range(start: int, stop: int | None) -> str:
    """Tokens [start, stop), e.g. `1K–2K`."""
    return f"{short(start)}–{'' if stop is None else short(stop)}"


def short(tokens: int) -> str:
    """A number of tokens, whole multiples of 1,024 as K."""
    return f"{tokens // 1024}K" if tokens and tokens % 1024 == 0 else str(tokens)
