"""The models that come with the package, by name."""

from __future__ import annotations

import functools
from pathlib import Path

from nsm_core.errors import CheckpointError, NsmError
from nsm_core.model.identity import fingerprint

CHECKPOINTS = Path(__file__).parent / "checkpoints"
BUNDLED = CHECKPOINTS / "pulse-books-keyed"  # the default model

# Weights of the default model that were replaced: the beginning of their fingerprint, and a commit whose tree has them
REPLACED = {
    "0bd69b1d2313": "02a3e64f",
    "b7747ae40f2d": "2741fafe",
    "deabff18c759": "35bdc8ae",
    "26f0cc71f55f": "754a3ddf",
    "898991b72f6c": "1033a515",
}


def find_checkpoint(model: Path | None) -> Path:
    """The directory of a model: the one given, or that of a bundled model (None: the default) by its bare name.

    Raises CheckpointError for a bare name that is neither.
    """
    if model is None:
        return BUNDLED
    if len(model.parts) != 1 or model.exists():
        return model
    if model.name not in bundled_names():
        raise no_model(model)
    return CHECKPOINTS / model


def no_model(path: Path) -> CheckpointError:
    """For a path where nothing is."""
    expected = f"a model's file or directory, or the name of a bundled model ({', '.join(bundled_names())})"
    return CheckpointError(f"no model {path}: expected {expected}")


def bundled_names() -> tuple[str, ...]:
    """In alphabetical order."""
    return tuple(sorted(path.name for path in CHECKPOINTS.iterdir() if path.is_dir()))


@functools.cache
def bundled_name(model_fingerprint: str) -> str | None:
    """The name of the bundled model with this fingerprint; None: of another. Reads the files of all once."""
    return next((name for name, own in _fingerprints().items() if own == model_fingerprint), None)


def commit_of_replaced(model_fingerprint: str) -> str | None:
    """Whose tree has these weights as the default model's; None: they never were."""
    return REPLACED.get(model_fingerprint[:12])


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
