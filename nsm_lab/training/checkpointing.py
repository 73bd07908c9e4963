"""What a resumed run needs: weights in full precision, the optimisers' memory, the step. One safetensors file."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from nsm_core.errors import CheckpointError
from nsm_core.model.nsm import NsmModel
from nsm_lab.training.average import WeightAverage
from nsm_lab.training.optim import Optimizers

RESUME_FILE = "resume.safetensors"
_MODEL, _OPTIMIZER, _AVERAGE = "model.", "optimizer.", "average."


def _model_tensors(model: NsmModel) -> dict[str, Tensor]:
    """Parameters and all buffers, those too that a model file does without."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def save(
    directory: Path, step: int, model: NsmModel, optimizers: Optimizers, average: WeightAverage | None = None
) -> None:
    """Writes the file whole or not at all; `step` is the next one to do."""
    tensors = {_MODEL + name: value for name, value in _model_tensors(model).items()}
    tensors.update({_OPTIMIZER + name: value for name, value in optimizers.tensors().items()})
    if average is not None:
        tensors.update({_AVERAGE + name: value for name, value in average.tensors().items()})
    partial = directory / (RESUME_FILE + ".partial")
    plain = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    save_file(plain, str(partial), metadata={"step": str(step), "config": model.config.to_json()})
    os.replace(partial, directory / RESUME_FILE)


def load(directory: Path, model: NsmModel, optimizers: Optimizers, average: WeightAverage | None = None) -> int:
    """Restores model, optimisers and average; returns the step to go on with. Raises CheckpointError."""
    file = directory / RESUME_FILE
    if not file.exists():
        raise CheckpointError(f"nothing to resume: {file} does not exist")
    with safe_open(str(file), framework="pt") as stored:
        metadata = stored.metadata()
        if metadata["config"] != model.config.to_json():
            raise CheckpointError(f"{file} was made with another model configuration")
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}
    with torch.no_grad():
        for name, target in _model_tensors(model).items():
            target.copy_(tensors[_MODEL + name])
    device = next(model.parameters()).device
    optimizers.load_tensors({name: value.to(device) for name, value in _part(tensors, _OPTIMIZER).items()})
    if average is not None:
        if not (averaged := _part(tensors, _AVERAGE)):
            raise CheckpointError(f"{file} holds no averaged weights: it was made with --ema 0")
        average.load_tensors(averaged)
    return int(metadata["step"])


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
