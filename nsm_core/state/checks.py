"""Checks for every value that is read from a stored state."""

from __future__ import annotations

from nsm_core.errors import SnapshotCorrupt


def require(condition: bool, message: str) -> None:
    """Raises SnapshotCorrupt unless `condition` holds."""
    if not condition:
        raise SnapshotCorrupt(f"snapshot refused: {message}")


def is_int(value: object, low: int, high: int) -> bool:
    """A whole number in [low, high]; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def is_text(value: object) -> bool:
    """A text that is not empty."""
    return isinstance(value, str) and bool(value)
