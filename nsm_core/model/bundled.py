"""The models that come with the package, by name."""

from __future__ import annotations

import functools
from pathlib import Path

from nsm_core.errors import CheckpointError, NsmError
from nsm_core.model.identity import fingerprint

CHECKPOINTS = Path(__file__).parent / "checkpoints"
BUNDLED = CHECKPOINTS / "pulse-books-keyed"  # the default model


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


@functools.cache
def bundled_name(model_fingerprint: str) -> str | None:
    """The name of the bundled model with this fingerprint; None: of another. Reads the files of all once."""
    return next((name for name, own in _fingerprints().items() if own == model_fingerprint), None)


@functools.cache
def _fingerprints() -> dict[str, str]:
    """Of the bundled models whose files are here: an image may leave them out."""
    found = {}
    for path in sorted(CHECKPOINTS.glob("*")):
        try:
            found[path.name] = fingerprint(path)
        except NsmError:
            continue
    return found
