"""The models that come with the package, by name."""

from __future__ import annotations

from pathlib import Path

CHECKPOINTS = Path(__file__).parent / "checkpoints"
BUNDLED = CHECKPOINTS / "pulse-books"  # the default model


def find_checkpoint(model: Path | None) -> Path:
    """The directory of a model: the one given, or that of a bundled model (None: the default) by its bare name."""
    if model is None:
        return BUNDLED
    is_name = len(model.parts) == 1 and not model.exists()
    return CHECKPOINTS / model if is_name and (CHECKPOINTS / model).is_dir() else model
