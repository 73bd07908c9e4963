"""Whether a model uses its memory slots: how evenly tokens are routed to them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nsm_core.model.nsm import NsmModel
from nsm_core.model.pulse import Router

# A slot with less than this share of its fair load k/M is dead.
DEAD_SHARE = 0.01


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlotUsage:
    """Means over all layers and heads. The load of a slot is the share of tokens that write to it."""

    num_tokens: int
    slots_per_head: int
    dead_fraction: float  # slots whose load is below 0.01 k/M
    effective_slots: float  # exp(entropy of the load): M when all are used alike, 1 when one takes everything
    max_over_mean_load: float


@torch.inference_mode()
def measure_slot_usage(model: NsmModel, texts: Iterable[Tensor]) -> SlotUsage:
    """Reads each of `texts` (ids [T] int64) from its start and counts the tokens that write to each slot."""
    routers = [module for module in model.modules() if isinstance(module, Router)]
    counts = torch.zeros(len(routers), routers[0].heads, routers[0].slots, dtype=torch.float64)
    num_tokens = 0
    with _watch(routers, counts):
        for ids in texts:
            model(ids[None], model.initial_state(1))
            num_tokens += len(ids)
    return _summarise(counts / num_tokens, num_tokens, routers[0].top_k)


@contextlib.contextmanager
def _watch(routers: list[Router], counts: Tensor) -> Iterator[None]:
    """While open, every call of router i adds its writes to counts[i] [H, M]."""

    def watch_one(router: Router, layer_counts: Tensor) -> RemovableHandle:
        def count(module: nn.Module, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
            layer_counts.add_((output[1] > 0).flatten(0, -3).sum(dim=0).cpu())

        return router.register_forward_hook(count)

    handles = [watch_one(router, layer_counts) for router, layer_counts in zip(routers, counts, strict=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _summarise(load: Tensor, num_tokens: int, top_k: int) -> SlotUsage:
    """load [L, H, M]: share of tokens that write to the slot."""
    num_slots = load.shape[-1]
    share = load / load.sum(dim=-1, keepdim=True)
    entropy = torch.special.entr(share).sum(dim=-1)
    return SlotUsage(
        num_tokens=num_tokens,
        slots_per_head=num_slots,
        dead_fraction=float((load < DEAD_SHARE * top_k / num_slots).double().mean()),
        effective_slots=float(entropy.exp().mean()),
        max_over_mean_load=float((load.amax(dim=-1) / load.mean(dim=-1)).mean()),
    )
