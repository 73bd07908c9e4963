"""The models that come with the package, by name."""

from __future__ import annotations

from pathlib import Path

from nsm_core.errors import CheckpointError

CHECKPOINTS = Path(__file__).parent / "checkpoints"
BUNDLED = CHECKPOINTS / "pulse-books"  # the default model


def find_checkpoint(model: Path | None) -> Path:
    """The directory of a model: the one given, or that of a bundled model (None: the default) by its bare name.

    Raises CheckpointError for a bare name that is neither.
    """
    if model is None:
        return BUNDLED
    if len(model.parts) != 1 or model.exists():
        return model
    if model.name not in bundled_names():
        raise CheckpointError(
            f"no model {str(model)!r}: it is no file or directory here, and the bundled models are "
            f"{', '.join(bundled_names())}"
        )
    return CHECKPOINTS / model


def bundled_names() -> tuple[str, ...]:
    """In alphabetical order."""
    return tuple(sorted(path.name for path in CHECKPOINTS.iterdir() if path.is_dir()))
