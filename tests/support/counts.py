"""How often a test repeats itself: little in `make test`, much in `make soak` (pytest's --soak)."""

from __future__ import annotations

_is_soak = False


def enable_soak() -> None:
    """Called once, before any test module is imported."""
    global _is_soak
    _is_soak = True


def is_soak() -> bool:
    """Whether the long versions run."""
    return _is_soak


def scaled(reduced: int, full: int) -> int:
    """The count to use; good in parametrize and in `@settings(max_examples=scaled(20, 2000))` as well."""
    return full if _is_soak else reduced


def every_second(row: int, column: int) -> bool:
    """Whether to run this case of a table of cases: all in the soak, else a chessboard's fields of one colour, so that
    each row and each column is met.
    """
    return _is_soak or (row + column) % 2 == 0
