"""Loads a model directory for an engine."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from nsm_core.config import ModelConfig
from nsm_core.layer_pattern import parse_layer_pattern
from nsm_core.model import storage
from nsm_core.model.bundled import find_checkpoint
from nsm_core.model.nsm import NsmModel
from nsm_core.model_info import ModelInfo
from nsm_core.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run, with everything that identifies it.

    `fingerprint`: hash over config, weights and tokenizer. `numerics`: the class within which equal input gives equal
    bits. `created`: unix seconds of the weights file.
    """

    model: NsmModel
    tokenizer: Tokenizer
    config: ModelConfig
    fingerprint: str
    numerics: str
    name: str
    created: int
    num_parameters: int
    weight_format: str

    @property
    def info(self) -> ModelInfo:
        """The public description of the model."""
        spec = self.model.state_spec
        return ModelInfo(
            name=self.name,
            fingerprint=self.fingerprint,
            numerics=self.numerics,
            created=self.created,
            vocab_size=self.tokenizer.vocab_size,
            num_parameters=self.num_parameters,
            state_bytes=spec.num_bytes,
            state_layout=spec.layout(),
            chat_template=self.config.chat_template,
        )


def has_slots(config: ModelConfig) -> bool:
    """Whether any layer has memory slots."""
    return any(set(plan.kinds) & set("NCG") for plan in parse_layer_pattern(config.layer_pattern))


def numerics_class(device: torch.device) -> str:
    """Device kind, dtype and kernel build, e.g. `cpu/fp32/torch-2.13.0+cpu/AVX2`."""
    build = torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else torch.cuda.get_device_name(device)
    return f"{device.type}/fp32/torch-{torch.__version__}/{build}"


def load_checkpoint(path: Path | None = None, device: str = "cpu") -> LoadedModel:
    """Loads a model directory, or a bundled model by its name (None: the default one).

    Raises CheckpointError or ConfigError with the file's name.
    """
    directory = find_checkpoint(path)
    model, tokenizer, weight_format = storage.read_model(directory)
    target = torch.device(device)
    return LoadedModel(
        model=model.to(target),
        tokenizer=tokenizer,
        config=model.config,
        fingerprint=storage.fingerprint(directory),
        numerics=numerics_class(target),
        name=directory.resolve().name,
        created=int((directory / storage.WEIGHTS_FILE).stat().st_mtime),
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        weight_format=weight_format.value,
    )
