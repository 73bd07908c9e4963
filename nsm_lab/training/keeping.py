"""Heads of keyed layers that are made to keep what they hold (`nsm train --keep-heads`).

Left to themselves, most heads learn to clear their slots at every word or sentence: that lowers the loss of the next
tokens soonest, and what a head would have kept for thousands of tokens, no gradient shows. So some heads of each layer
are not asked. They do not decay, and write so weakly that a text of thousands of tokens fits into their slots.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from nsm_core.model.keyed import ContextTaps, KeyedMixer

# Strengths of the keeping heads, evenly spaced on a log scale. A head of M slots forgets over M / strength tokens.
STRENGTH_RANGE = (0.03, 0.004)
TIMESCALE = 1e6  # tokens after which the decay alone leaves 1 / e
BIAS_ROOM = 0.5  # how far a strength's logit may rise in training
CONTEXT_LENGTH = 0.6  # of the longest row that lets a strength depend on the token
# A head whose row is longer has learned to write and clear by what it reads; such heads give way first.
LEARNED_LENGTH = 1.0


@torch.no_grad()
def make_keeping_heads(model: nn.Module, count: int) -> None:
    """Resets `count` heads of every keyed layer: new routes, nothing added to the residual, rates that keep."""
    for mixer in _keyed_mixers(model):
        for number, head in enumerate(_giving_way(mixer, count)):
            _reset(mixer, head)
            share = number / max(1, count - 1)
            strength = math.exp((1.0 - share) * math.log(STRENGTH_RANGE[0]) + share * math.log(STRENGTH_RANGE[1]))
            mixer.rates.bias[head] = math.log(strength / (1.0 - strength))
            mixer.rates.bias[mixer.heads + head] = math.log(math.expm1(1.0 / TIMESCALE))
            mixer.rates.weight[[head, mixer.heads + head]] = 0.0


class KeepingHeads:
    """Holds the rates of keeping heads where they must stay. A head is one of them if its decay looks at no token."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = [(mixer.rates, heads) for mixer in _keyed_mixers(model) if len(heads := _keeping(mixer))]
        self._highest = [rates.bias.detach()[heads] + BIAS_ROOM for rates, heads in self._layers]

    @torch.no_grad()
    def hold(self) -> None:
        """After a step of the optimisers."""
        for (rates, heads), highest in zip(self._layers, self._highest, strict=True):
            decays = heads + rates.out_features // 2
            rates.weight[decays] = 0.0
            rates.bias[decays] = math.log(math.expm1(1.0 / TIMESCALE))
            rates.bias[heads] = torch.minimum(rates.bias[heads], highest)
            rates.weight[heads] = torch.renorm(rates.weight[heads], p=2, dim=0, maxnorm=CONTEXT_LENGTH)


def _keyed_mixers(model: nn.Module) -> list[KeyedMixer]:
    return [module for module in model.modules() if isinstance(module, KeyedMixer)]


def _giving_way(mixer: KeyedMixer, count: int) -> list[int]:
    """Heads that have learned to clear their slots first, and of these the last: they began as the slowest."""
    lengths = mixer.rates.weight[: mixer.heads].norm(dim=1).tolist()
    by_use = sorted(range(mixer.heads), key=lambda head: (lengths[head] >= LEARNED_LENGTH, head))
    return sorted(by_use[-count:])


def _keeping(mixer: KeyedMixer) -> Tensor:
    """Numbers of the heads [n]."""
    return (mixer.rates.weight[mixer.heads :] == 0).all(dim=1).nonzero().flatten()


def _reset(mixer: KeyedMixer, head: int) -> None:
    routes = slice(head * mixer.slots, (head + 1) * mixer.slots)
    values = slice(head * mixer.width, (head + 1) * mixer.width)
    nn.init.normal_(mixer.project.weight[routes], std=mixer.project.in_features**-0.5)
    fresh = ContextTaps(len(mixer.conv.read), mixer.slots, 1)
    mixer.conv.read[:, routes], mixer.conv.write[:, routes] = fresh.read, fresh.write
    mixer.out.weight[:, values] = 0.0
