"""A tier of a model: the same weights with fewer memory slots, so smaller states (docs/model.md, "Capacity tiers").

A tier is a model directory of its own, which is served, evaluated and exported like any other.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import Tensor

from nsm_core.config import ModelConfig
from nsm_core.errors import ConfigError
from nsm_core.model import storage
from nsm_core.model.nsm import NsmModel


def tier_config(config: ModelConfig, num_slots: int) -> ModelConfig:
    """The shape of a model with the first `num_slots` slots of every head. Raises ConfigError."""
    try:
        dataclasses.replace(config, state_tiers=(num_slots,))
    except ConfigError as error:
        raise ConfigError(f"the model has no tier of {num_slots} states: {error}") from error
    return dataclasses.replace(
        config,
        num_memory_slots=num_slots,
        write_top_k=min(config.write_top_k, num_slots),
        communication_top_k=min(config.communication_top_k, num_slots),
        start_slots=min(config.start_slots, num_slots),
        timescale_groups=1,  # time scales are learned: the remaining slots keep theirs
        state_tiers=(),
    )


def write_tier(directory: Path, num_slots: int, output: Path) -> None:
    """Writes the tier of `num_slots` slots a head of the model in `directory` to `output`, a new or empty directory.

    Stored numbers are copied as they are, int8 rows with their scales, so the tier's weights have the model's bits.
    Raises ConfigError or CheckpointError.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"{output} exists and is not an empty directory")
    files = storage.read_files(directory)
    config = tier_config(files.config, num_slots)
    whole, small = _shapes(files.config), _shapes(config)
    tensors = {}
    for name, value in files.tensors.items():
        parameter = storage.parameter_of(name)
        if parameter not in small:
            continue
        if whole.get(parameter) == small[parameter]:
            tensors[name] = value
            continue
        shape = _stored_shape(name, small)
        if parameter + storage.STEPS_SUFFIX in files.tensors:
            if whole[parameter][1:] != small[parameter][1:]:
                raise ConfigError(f"{directory}: slots share grids in the int4 matrix {parameter}: use a file in int8")
            shape = (small[parameter][0], *value.shape[1:])
        tensors[name] = _first_slots(value, shape, files.config.num_memory_slots, num_slots)
    storage.write_files(output, storage.ModelFiles(config, files.tokenizer, tensors, files.weight_format))


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    with storage.NoStart():
        return {name: tuple(value.shape) for name, value in NsmModel(config).state_dict().items()}


def _stored_shape(name: str, shapes: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    """The shape in the tier's file; the scales of a tensor lack its dimension 1, see `quantize_rows`."""
    shape = shapes[storage.parameter_of(name)]
    return (*shape[:1], *shape[2:]) if name.endswith(storage.SCALE_SUFFIX) else shape


def _first_slots(value: Tensor, shape: tuple[int, ...], num_slots: int, num_first: int) -> Tensor:
    """The first slots along the one dimension that counts slots, or heads times slots; other tensors as they are."""
    differing = [dim for dim, (have, want) in enumerate(zip(value.shape, shape, strict=True)) if have != want]
    if not differing:
        return value
    (dim,) = differing
    by_slot: Tensor = torch.unflatten(value, dim, (-1, num_slots))
    return by_slot.narrow(dim + 1, 0, num_first).flatten(dim, dim + 1).clone()
