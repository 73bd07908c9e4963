"""A model with fewer memory slots: the same weights, smaller states (docs/model.md, "Capacity tiers")."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from nsm_core.config import ModelConfig
from nsm_core.model.nsm import NsmModel
from nsm_core.model.router import Router
from nsm_core.model.storage import NoStart


def tier_config(config: ModelConfig, num_slots: int) -> ModelConfig:
    """The shape of a model that reads with the first `num_slots` slots of every head."""
    return dataclasses.replace(
        config,
        num_memory_slots=num_slots,
        write_top_k=min(config.write_top_k, num_slots),
        communication_top_k=min(config.communication_top_k, num_slots),
        start_slots=min(config.start_slots, num_slots),
        timescale_groups=1,  # time scales are learned: those of the slots that stay
        state_tiers=(),
    )


def tier_model(model: NsmModel, num_slots: int) -> NsmModel:
    """`model` as if its slots from `num_slots` on were not there; for inference only.

    Everything that is not of a slot is shared with `model`.
    """
    config = tier_config(model.config, num_slots)
    with NoStart():
        small = NsmModel(config)
    shapes = {name: value.shape for name, value in small.state_dict().items()}
    kept = {
        name: _first_slots(value, shapes[name], model.config.num_memory_slots, num_slots)
        for name, value in model.state_dict().items()
        if name in shapes
    }
    small.load_state_dict(kept, assign=True)
    for router in (module for module in small.modules() if isinstance(module, Router)):
        router.to(model.final_norm.weight.device).reset_load()  # not stored
    return small.eval().requires_grad_(False)


def _first_slots(value: Tensor, shape: tuple[int, ...], num_slots: int, num_kept: int) -> Tensor:
    """Of the one dimension that counts slots, or heads times slots, the slots that stay; others as they are."""
    differing = [dim for dim, (have, want) in enumerate(zip(value.shape, shape, strict=True)) if have != want]
    if not differing:
        return value
    (dim,) = differing
    by_slot: Tensor = torch.unflatten(value, dim, (-1, num_slots))
    return by_slot.narrow(dim + 1, 0, num_kept).flatten(dim, dim + 1).clone()
