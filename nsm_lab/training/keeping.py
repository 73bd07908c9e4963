"""Heads of keyed layers that are made to keep what they hold (`nsm train --keep-heads`).

Left to themselves, most heads learn to clear their slots at every word or sentence: that lowers the loss of the next
tokens soonest, and what a head would have kept for thousands of tokens, no gradient shows. So some heads of each layer
are not asked. They do not decay, and write so weakly that a text of thousands of tokens fits into their slots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nsm_core.model.keyed import KeyedMixer
from nsm_core.model.nsm import NsmModel

TIMESCALE = 1e6  # tokens after which the decay alone leaves 1 / e
FIRST_SHARE = 0.6  # of the most that it may write, what a new keeping head writes
FIRST_READ = 0.25  # of what it has added to the residual by reading
MOST_LOWERED = 1.0  # of the logit of a strength at once, by its budget
CONTEXT_LENGTH = 1.0  # of the longest row that lets a strength depend on the token
# A head whose row is longer has learned to write and clear by what it reads; such heads give way first.
LEARNED_LENGTH = 1.0


@torch.no_grad()
def make_keeping_heads(model: nn.Module, strengths: Sequence[float]) -> None:
    """Makes one head of every keyed layer keep for each of `strengths`, the most that they may write of a token.

    Heads that keep already go first, the strongest to the greatest strength. The others have learned routes and values
    for a memory of a few sentences; they go on with them, and what they read is let in slowly, as it is another's now.
    A head of M slots forgets over M / strength tokens.
    """
    greatest = sorted(strengths, reverse=True)
    for mixer in keyed_mixers(model):
        new = greatest[len(keeping_numbers(mixer)) :]
        for head, strength in zip(_giving_way(mixer, len(new)), new, strict=True):
            mixer.out_norm[head * mixer.width : (head + 1) * mixer.width] *= FIRST_READ
            mixer.rates.bias[head] = _logit(FIRST_SHARE * strength)
            mixer.rates.bias[mixer.heads + head] = math.log(math.expm1(1.0 / TIMESCALE))
            mixer.rates.weight[[head, mixer.heads + head]] = 0.0


class KeepingHeads:
    """Holds the rates of keeping heads where they must stay. A head is one of them if its decay looks at no token.

    `strengths` as in `make_keeping_heads`; without them the heads may write what they write now. `context`: the longest
    row that lets a strength depend on the token. What a layer reads has a length of about sqrt(d), so a row of length
    c moves the logit of a strength by up to c sqrt(d): 22 at width 512 for a row of 1, which is no bound.
    """

    def __init__(self, model: nn.Module, strengths: Sequence[float] = (), context: float = CONTEXT_LENGTH) -> None:
        self._layers, self._context = [], context
        self._is_held = []  # of each keyed layer
        for mixer in keyed_mixers(model):
            heads = keeping_numbers(mixer)
            self._is_held.append(len(heads) > 0)
            highest = mixer.rates.bias.detach()[heads]
            for number, strength in enumerate(sorted(strengths, reverse=True)[: len(heads)]):
                highest[number] = _logit(strength)
            if len(heads):
                self._layers.append((mixer.rates, heads, highest))

    @torch.no_grad()
    def hold(self) -> None:
        """After a step of the optimisers."""
        for rates, heads, highest in self._layers:
            decays = heads + rates.out_features // 2
            rates.weight[decays] = 0.0
            rates.bias[decays] = math.log(math.expm1(1.0 / TIMESCALE))
            rates.bias[heads] = torch.minimum(rates.bias[heads], highest)
            rates.weight[heads] = _shortened(rates.weight[heads], self._context)

    @torch.no_grad()
    def keep_to_budget(self, means: Sequence[Tensor]) -> None:
        """`means`: as of `mean_strengths`. A head that writes more than its bound on average gets a lower bias.

        So it may write some tokens strongly, if it writes the others all the more weakly.
        """
        for (rates, heads, highest), mean in zip(self._layers, self._of_layers(means), strict=True):
            excess = (mean[heads] / torch.sigmoid(highest)).log()
            rates.bias[heads] -= excess.clamp(min=0.0, max=MOST_LOWERED)

    def _of_layers(self, means: Sequence[Tensor]) -> list[Tensor]:
        """Of the layers with keeping heads alone."""
        return [mean for mean, is_held in zip(means, self._is_held, strict=True) if is_held]


@torch.no_grad()
def mean_strengths(model: NsmModel, ids: Tensor) -> list[Tensor]:
    """What the heads of each keyed layer write of a token on average, [H] each, over texts ids [B,T] read from new
    states.
    """
    found: list[Tensor] = []

    def capture(rates: nn.Module, inputs: object, logits: Tensor) -> None:
        found.append(torch.sigmoid(logits[..., : logits.shape[-1] // 2].float()).flatten(0, -2).mean(dim=0))

    hooks = [mixer.rates.register_forward_hook(capture) for mixer in keyed_mixers(model)]
    try:
        with torch.compiler.set_stance("force_eager"):  # compiled blocks know nothing of hooks
            model.read(ids, model.initial_state(len(ids)))
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _shortened(rows: Tensor, longest: float) -> Tensor:
    """rows [n, d], none longer than `longest`, which may be 0."""
    share = (longest / rows.norm(dim=1, keepdim=True).clamp(min=1e-12)).clamp(max=1.0)
    return rows.mul(share)


def _logit(share: float) -> float:
    return math.log(share / (1.0 - share))


def keyed_mixers(model: nn.Module) -> list[KeyedMixer]:
    return [module for module in model.modules() if isinstance(module, KeyedMixer)]


def _giving_way(mixer: KeyedMixer, count: int) -> list[int]:
    """Heads that have learned to clear their slots first, and of these the last: they began as the slowest."""
    lengths, keeping = mixer.rates.weight[: mixer.heads].norm(dim=1).tolist(), set(keeping_numbers(mixer).tolist())
    others = [head for head in range(mixer.heads) if head not in keeping]
    by_use = sorted(others, key=lambda head: (lengths[head] >= LEARNED_LENGTH, head))
    return sorted(by_use[len(by_use) - count :])


def keeping_numbers(mixer: KeyedMixer) -> Tensor:
    """Numbers [n] of the heads whose decay looks at no token, the one with the greatest bias of its strength first."""
    heads = (mixer.rates.weight[mixer.heads :] == 0).all(dim=1).nonzero().flatten()
    return heads[mixer.rates.bias.detach()[heads].argsort(descending=True)]
