"""Figures of a layer's activity over a text, by state and by token."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from nsm_core.errors import InvalidRequest
from nsm_core.inspection.probe import states_written, write_entropy
from nsm_core.inspection.reading import LayerActivity

UNUSED_WEIGHT = 1e-3  # a token that replaces less of a state does not use it


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenFigures:
    """Of each token in each head, [T,H]. `entropy`: of the write weights over the states, 1 where all are equal;
    `states_per_token`: exp of it, in states, 0 where nothing is written; `sparsity`: share of states that the token
    does not use; `strength`: sum of the write weights, in states overwritten.
    """

    entropy: Tensor
    states_per_token: Tensor
    sparsity: Tensor
    strength: Tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateFigures:
    """Of each state in each head, [H,M].

    `importance`: mean over tokens of its write weight and its read weight; `utilisation`: share of tokens that use it;
    `half_life`: tokens until half of its content is replaced, at its mean decay, inf if nothing was written;
    `specialisation`: 1 - entropy of its writes over the tokens / the maximum: 0 if all tokens write alike,
    1 if one token alone writes.
    """

    importance: Tensor
    utilisation: Tensor
    half_life: Tensor
    specialisation: Tensor


def write_of(layer: LayerActivity) -> Tensor:
    """[T,H,M]. Raises InvalidRequest for a layer that writes to no states."""
    if layer.write is None:
        raise InvalidRequest(f"layer {layer.name} ({layer.kind}) writes to no states", param="layer")
    return layer.write


def routing_of(layer: LayerActivity) -> Tensor:
    """[T,H,M]: how each token's writing is shared among the states of a head; 0 where it writes nothing."""
    write = write_of(layer)
    total = write.sum(dim=-1, keepdim=True)
    return write / total.where(total > 0, torch.ones_like(total))


def token_figures(layer: LayerActivity) -> TokenFigures:
    """Raises InvalidRequest for a layer that writes to no states."""
    write = write_of(layer)
    entropy = write_entropy(write)
    return TokenFigures(
        entropy=entropy / math.log(max(2, write.shape[-1])),
        states_per_token=states_written(write),
        sparsity=(write < UNUSED_WEIGHT).float().mean(dim=-1),
        strength=write.sum(dim=-1),
    )


def state_figures(layer: LayerActivity) -> StateFigures:
    """Raises InvalidRequest for a layer that writes to no states."""
    write = write_of(layer)
    mass = write.sum(dim=0)
    shares = write / mass.where(mass > 0, torch.ones_like(mass))
    spread = torch.special.entr(shares).sum(dim=0) / math.log(max(2, len(write)))
    return StateFigures(
        importance=(write if layer.read is None else write + layer.read).mean(dim=0),
        utilisation=(write >= UNUSED_WEIGHT).float().mean(dim=0),
        half_life=math.log(2) / torch.log1p(-write.double()).mean(dim=0).abs(),
        specialisation=torch.where(mass > 0, 1 - spread, 0.0),
    )


def smoothness(layer: LayerActivity) -> Tensor:
    """[H,M] in [-1, 1]: mean cosine between a state's changes at neighbouring tokens; NaN where it never changed twice.

    1: it moves straight on, 0: every token moves it in a new direction. Raises InvalidRequest for a layer that has no
    states.
    """
    if layer.trajectory is None:
        raise InvalidRequest(f"layer {layer.name} ({layer.kind}) has no states to follow", param="layer")
    return layer.trajectory.turn.nanmean(dim=0)
