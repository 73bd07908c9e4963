"""The balance of routers' slots: measurements in training, and optional penalties."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

# A slot with less than this share of a slot's mean load is dead.
DEAD_SHARE = 0.01


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RouterBalance:
    """Means over the routers' heads, of the tokens since the last reset.

    The load of a slot is the share of tokens that choose it; with a sigmoid router, which chooses none, its write
    weights. `half_life`: tokens after which half of the median slot's content is replaced, at its mean decay.
    """

    dead_slots: float  # share of slots with less than a hundredth of the mean load
    effective_slots: float  # exp(entropy of the load): M when all are used alike
    max_load: float  # of the busiest slot, in mean loads
    slots_written: float  # sum of a token's write weights: 1 is one slot overwritten
    half_life: float


def token_mean(x: Tensor, valid: Tensor | None) -> Tensor:
    """x [..., H, M] -> [H, M]: mean over the tokens that are `valid` [...]; None: all."""
    x = x.flatten(0, -3)
    if valid is None:
        return x.mean(dim=0)
    weight = valid.flatten().to(x.dtype)
    return torch.einsum("nhm,n->hm", x, weight) / weight.sum().clamp(min=1.0)


def balance_loss(chosen: Tensor, probability: Tensor) -> Tensor:
    """chosen, probability [H, M]: mean over tokens of whether a slot is chosen and of its score; shares within a head.

    M * sum(chosen share * score share), mean over heads: 1 where slots are used alike, M where one takes all. The
    gradient is that of the scores.
    """
    shares = [x / x.sum(dim=-1, keepdim=True).clamp(min=1e-9) for x in (chosen.detach(), probability)]
    return chosen.shape[-1] * (shares[0] * shares[1]).sum(dim=-1).mean()


def slot_use(uses: Sequence[Tensor]) -> RouterBalance | None:
    """From each router's means [3, H, M]: load, write weights, log decay. None without any."""
    if not uses:
        return None
    heads = [_heads(*use.detach().double().cpu()) for use in uses]  # routers may differ in their number of slots
    is_dead, effective, busiest, written, half_lives = (
        torch.cat(of_routers) for of_routers in zip(*heads, strict=True)
    )
    return RouterBalance(
        dead_slots=float(is_dead.double().mean()),
        effective_slots=float(effective.mean()),
        max_load=float(busiest.mean()),
        slots_written=float(written.mean()),
        half_life=float(half_lives.median()),
    )


def _heads(load: Tensor, written: Tensor, log_decay: Tensor) -> tuple[Tensor, ...]:
    """One router's means [H, M] -> is dead [H M]; effective slots, busiest, written [H]; half-lives [H M]."""
    mean = load.mean(dim=-1, keepdim=True).clamp(min=1e-30)
    shares = load / load.sum(dim=-1, keepdim=True).clamp(min=1e-30)
    return (
        (load < DEAD_SHARE * mean).flatten(),
        torch.special.entr(shares).sum(dim=-1).exp(),
        (load / mean).amax(dim=-1),
        written.sum(dim=-1),
        (math.log(2.0) / -log_decay).flatten(),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Penalties:
    """Of one router at one batch: [] each, before any coefficient."""

    balance: Tensor
    z: Tensor


def weighted(penalties: Iterable[Penalties], balance: float, z: float) -> Tensor | float:
    """The sum over routers, by the coefficients; 0 without routers."""
    return sum((balance * penalty.balance + z * penalty.z for penalty in penalties), start=0.0)
