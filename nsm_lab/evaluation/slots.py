"""Use of a model's memory slots: how evenly tokens are routed to them, and how long they remember."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nsm_core.model.router import Router
from nsm_lab.evaluation.reading import EvaluatedModel, reading

# A slot with less than this share of its fair load k/M is dead.
DEAD_SHARE = 0.01


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerSlots:
    """One layer with slots; means over its heads. The load of a slot is the share of tokens that write to it.

    Half-lives are those of a slot's content, at its mean decay over the text; quantiles over the slots of all heads.
    None: no such slot was ever written to.
    """

    layer: int  # from 0, layers of other kinds included
    dead_fraction: float  # slots whose load is below 0.01 k/M
    effective_slots: float  # exp(entropy of the load): M when all are used alike, 1 when one takes everything
    effective_by_weight: float  # the same of the sums of the write weights
    max_over_mean_load: float
    written_per_token: float  # sum of the write weights: 1 is one slot overwritten
    half_life_p10: float | None  # tokens
    half_life_median: float | None
    half_life_p90: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlotUsage:
    """Means over all layers with slots, and each of them."""

    num_tokens: int
    slots_per_head: int
    dead_fraction: float
    effective_slots: float
    effective_by_weight: float
    max_over_mean_load: float
    layers: tuple[LayerSlots, ...]


class _Tally:
    """Sums over tokens of one router's choices: [H, M] fp64 each."""

    def __init__(self, router: Router) -> None:
        self.top_k = router.top_k
        device = router.logits.bias.device
        self.count, self.write, self.log_decay = torch.zeros(
            3, router.heads, router.slots, dtype=torch.float64, device=device
        )

    def hook(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        log_decay = output.flatten(0, -3)
        write = -torch.expm1(log_decay)
        self.count += (write > 0).sum(dim=0)
        self.write += write.sum(dim=0, dtype=torch.float64)
        self.log_decay += log_decay.sum(dim=0, dtype=torch.float64)


def measure_slot_usage(model: EvaluatedModel, texts: Iterable[Tensor]) -> SlotUsage | None:
    """Reads each of `texts` (ids [T] int64) from its start. None for a model without slots."""
    routers = {_layer_of(name): module for name, module in model.named_modules() if isinstance(module, Router)}
    if not routers:
        return None
    num_tokens, tallies = 0, {layer: _Tally(router) for layer, router in routers.items()}
    with reading(model) as device, _watch(routers, tallies):
        for ids in texts:
            model.forward(ids[None].to(device), model.initial_state(1))
            num_tokens += len(ids)
    layers = tuple(_summarise(layer, tally, num_tokens) for layer, tally in tallies.items())
    return SlotUsage(
        num_tokens=num_tokens,
        slots_per_head=next(iter(routers.values())).slots,
        dead_fraction=_mean(layer.dead_fraction for layer in layers),
        effective_slots=_mean(layer.effective_slots for layer in layers),
        effective_by_weight=_mean(layer.effective_by_weight for layer in layers),
        max_over_mean_load=_mean(layer.max_over_mean_load for layer in layers),
        layers=layers,
    )


def _layer_of(name: str) -> int:
    """The number in a module's name, e.g. 3 of `blocks.3.mixer.router`."""
    return next(int(part) for part in name.split(".") if part.isdigit())


@contextlib.contextmanager
def _watch(routers: dict[int, Router], tallies: dict[int, _Tally]) -> Iterator[None]:
    """While open, the tally of each layer counts the choices of its router."""
    handles: list[RemovableHandle] = [
        router.register_forward_hook(tallies[layer].hook) for layer, router in routers.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return math.fsum(listed) / len(listed)


def _summarise(layer: int, tally: _Tally, num_tokens: int) -> LayerSlots:
    load = tally.count / num_tokens
    half_lives = math.log(2) / (tally.log_decay.abs() / num_tokens).flatten()  # inf for a slot without writes
    p10, median, p90 = (
        _finite(value)
        for value in half_lives.quantile(half_lives.new_tensor((0.1, 0.5, 0.9)), interpolation="nearest").tolist()
    )
    return LayerSlots(
        layer=layer,
        dead_fraction=float((load < DEAD_SHARE * tally.top_k / load.shape[-1]).double().mean()),
        effective_slots=_effective(load),
        effective_by_weight=_effective(tally.write),
        max_over_mean_load=float((load.amax(dim=-1) / load.mean(dim=-1)).mean()),
        written_per_token=float((tally.write / num_tokens).sum(dim=-1).mean()),
        half_life_p10=p10,
        half_life_median=median,
        half_life_p90=p90,
    )


def _effective(values: Tensor) -> float:
    """exp(entropy) of values [H, M] as shares of a head's slots, mean over heads."""
    share = values / values.sum(dim=-1, keepdim=True)
    return float(torch.special.entr(share).sum(dim=-1).exp().mean())


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
