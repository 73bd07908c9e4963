"""The architectures that can be served, by name: how each knows its files, and loads them.

To add one: a package beside `model` and `rwkv7` with a SequenceModel, a row here, a row in
`nsm_core/execution/choose.py`, which decides how it is computed, and one in `service/cli/model.py`, which describes its
files. benchmarks/notes/adding-layers.md has all steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from nsm_core.errors import ConfigError
from nsm_core.loaded_model import LoadedModel, SequenceModel
from nsm_core.model import loader as nsm_loader
from nsm_core.model import storage as nsm_storage
from nsm_core.model.bundled import find_checkpoint
from nsm_core.rwkv7 import claims as rwkv7_claims
from nsm_core.tokenizer import BpeTokenizer, Tokenizer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """`claims`: whether it should open the path; never raises. The others raise CheckpointError or
    ConfigError that names the file: `load` for a device; `open` the same for `choose_executor` alone, where weights may
    still be as in the file; `outline` the same for descriptions, which need no weights;
    `identify` fingerprint and tokenizer.
    """

    name: str
    claims: Callable[[Path], bool]
    load: Callable[[Path, str], LoadedModel[SequenceModel]]
    open: Callable[[Path, str], LoadedModel[SequenceModel]]
    outline: Callable[[Path, str], LoadedModel[SequenceModel]]
    identify: Callable[[Path], tuple[str, Tokenizer]]


def _identify_nsm(path: Path) -> tuple[str, Tokenizer]:
    return nsm_storage.fingerprint(path), BpeTokenizer.load(path)


def _identify_rwkv7(path: Path) -> tuple[str, Tokenizer]:
    from nsm_core.rwkv7.opening import open_files

    files = open_files(path)
    return files.fingerprint, files.tokenizer


def _load_rwkv7(path: Path, device: str) -> LoadedModel[SequenceModel]:
    """Its modules are imported for its own models alone."""
    from nsm_core.rwkv7.loader import load_rwkv7

    return load_rwkv7(path, device)


# The first that claims a path opens it; the last has the best message for a directory that no architecture claims.
ARCHITECTURES = (
    Architecture(
        name=rwkv7_claims.ARCHITECTURE,
        claims=rwkv7_claims.claims,
        load=_load_rwkv7,
        open=_load_rwkv7,  # it reads a tensor when an executor asks for it
        outline=_load_rwkv7,
        identify=_identify_rwkv7,
    ),
    Architecture(
        name=nsm_loader.ARCHITECTURE,
        claims=lambda path: True,
        load=nsm_loader.load_checkpoint,
        open=nsm_loader.open_checkpoint,
        outline=nsm_loader.outline_checkpoint,
        identify=_identify_nsm,
    ),
)


def architecture_of(path: Path) -> Architecture:
    """Whose files lie at the path."""
    return next(architecture for architecture in ARCHITECTURES if architecture.claims(path))


def load_model(model: Path | None = None, device: str = "cpu") -> LoadedModel[SequenceModel]:
    """Loads a file or directory of any architecture, or a bundled model by its name (None: the default one).

    Raises CheckpointError or ConfigError that names the file.
    """
    path = find_checkpoint(model)
    return architecture_of(path).load(path, device)


def open_model(model: Path | None = None, device: str = "cpu") -> LoadedModel[SequenceModel]:
    """As `load_model`, for `choose_executor` alone: kernels take weights as the file has them, which costs less."""
    path = find_checkpoint(model)
    return architecture_of(path).open(path, device)


def outline_model(model: Path | None = None, device: str = "cpu") -> LoadedModel[SequenceModel]:
    """As `load_model`, for descriptions: shapes are right, the weights may be anything."""
    path = find_checkpoint(model)
    return architecture_of(path).outline(path, device)


def require_nsm(loaded: LoadedModel[SequenceModel]) -> nsm_loader.LoadedNsm:
    """For commands that look into memory slots. Raises ConfigError for a model of another architecture."""
    if not isinstance(loaded, nsm_loader.LoadedNsm):
        raise ConfigError(f"{loaded.name} is of the architecture {loaded.architecture}, which has no memory slots")
    return loaded


def identify(model: Path | None = None) -> tuple[str, Tokenizer]:
    """The fingerprint and the tokenizer of what `load_model` would load. Raises as it does."""
    path = find_checkpoint(model)
    return architecture_of(path).identify(path)
