"""Loads a model directory of the NSM family."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import torch

from nsm_core.config import ModelConfig
from nsm_core.layer_pattern import parse_layer_pattern
from nsm_core.loaded_model import LoadedModel, numerics_class
from nsm_core.model import storage
from nsm_core.model.bundled import find_checkpoint
from nsm_core.model.nsm import NsmModel
from nsm_core.tokenizer import Tokenizer

ARCHITECTURE = "nsm"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadedNsm(LoadedModel[NsmModel]):
    """A loaded model of this family, of which laboratory commands want to know more.

    `matrices`: see `OpenedModel`; empty when `model` has all of its weights.
    """

    matrices: Mapping[str, storage.StoredRows] = dataclasses.field(default_factory=dict)

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    def filled(self) -> LoadedNsm:
        """This model with all of its weights in fp32."""
        storage.fill(self.model, self.matrices)
        return dataclasses.replace(self, matrices={})


def has_slots(config: ModelConfig) -> bool:
    """Whether any layer has memory slots."""
    return any(set(plan.kinds) & set("NCGK") for plan in parse_layer_pattern(config.layer_pattern))


def load_checkpoint(path: Path | None = None, device: str = "cpu") -> LoadedNsm:
    """Loads a model directory, or a bundled model by its name (None: the default one).

    Raises CheckpointError or ConfigError with the file's name.
    """
    directory = find_checkpoint(path)
    return _loaded(directory, device, *storage.read_model(directory))


def open_checkpoint(path: Path | None = None, device: str = "cpu") -> LoadedNsm:
    """As `load_checkpoint`, for `choose_executor`: on a CPU large matrices stay as the file has them."""
    directory = find_checkpoint(path)
    if device != "cpu":
        return load_checkpoint(directory, device)
    opened = storage.open_model(directory)
    loaded = _loaded(directory, device, opened.model, opened.tokenizer, opened.weight_format)
    return dataclasses.replace(loaded, matrices=opened.matrices)


def outline_checkpoint(path: Path | None = None, device: str = "cpu") -> LoadedNsm:
    """As `load_checkpoint`, for descriptions: no weight is read, and the model's numbers mean nothing."""
    directory = find_checkpoint(path)
    return _loaded(directory, device, *storage.read_outline(directory))


def _loaded(
    directory: Path, device: str, model: NsmModel, tokenizer: Tokenizer, weight_format: storage.WeightFormat
) -> LoadedNsm:
    target = torch.device(device)
    return LoadedNsm(
        architecture=ARCHITECTURE,
        model=model.to(target),
        device=target,
        tokenizer=tokenizer,
        chat_template=model.config.chat_template,
        fingerprint=storage.fingerprint(directory),
        numerics=numerics_class(target),
        name=directory.resolve().name,
        created=int((directory / storage.WEIGHTS_FILE).stat().st_mtime),
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        weight_format=weight_format.value,
    )
