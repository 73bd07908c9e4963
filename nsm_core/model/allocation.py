"""Slot allocation: importance, pressure, and the decisions at boundaries of the text.

benchmarks/notes/layers.md, "Slots that come and go". No gradient passes through here: decisions are not differentiable.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from nsm_core.config import ModelConfig
from nsm_core.state.spec import State

DECAY = 0.999  # of importance and pressure, at every token
MAX_ALLOCATED = 2  # at a boundary


class SlotAllocation(NamedTuple):
    """What a layer carries beside its slots.

    importance [B,H,M]: decayed sum of a slot's write and read weights. pressure [B,H]: decayed mean of how
    much important content a token overwrites. age [B,H,M]: boundaries since the slot came into use, counted up to
    one more than any rule uses. active [B,H,M]: 1 for slots in use, 0 for the others.
    """

    importance: Tensor
    pressure: Tensor
    age: Tensor
    active: Tensor

    @classmethod
    def of(cls, state: State) -> SlotAllocation:
        return cls(*(state[name] for name in cls._fields))

    @property
    def mask(self) -> Tensor:
        """[B,H,M] bool. A state that was rounded at rest has ones that are not quite."""
        return self.active > 0.5


class Tokens(NamedTuple):
    """What tokens did to the slots. write, read [B,T,H,M]; counted [B,T] bool: tokens that are any; starts [B,T] bool,
    or None for none: the first tokens of texts that begin here.
    """

    write: Tensor
    read: Tensor
    counted: Tensor
    starts: Tensor | None = None


@torch.no_grad()
def follow(use: SlotAllocation, tokens: Tokens, start: Tensor) -> SlotAllocation:
    """After these tokens. `start` [B,H,M] bool: the slots that a text begins with.

    All tokens at once: with r the number of tokens so far, a sum that decays is DECAY^r times a sum of amounts that
    were divided by DECAY^r. A piece has at most some thousands of tokens, so that no factor is large.
    """
    dtype, counted = use.importance.dtype, tokens.counted[..., None, None]
    write = torch.where(counted, tokens.write, 0.0).to(dtype)
    mass = write + torch.where(counted, tokens.read, 0.0).to(dtype)
    rank = tokens.counted.cumsum(dim=1).to(dtype)  # [B,T]
    grown = ((1 - DECAY) * DECAY ** (-rank))[..., None]
    added = grown[..., None] * mass
    total = added.cumsum(dim=1)
    is_first, since, is_last = _documents(tokens.starts, total - added, use)
    # importance before each token, but for a factor that all slots share
    before = torch.where(is_first[..., None, None], use.importance[:, None], 0.0) + total - added - since
    if tokens.starts is not None:
        before = before.masked_fill(_is_unwritten(tokens.counted, tokens.starts)[..., None, None], 0.0)
    overwritten = _ratio((write * before).sum(dim=-1), before.sum(dim=-1))  # [B,T,H]
    shrunk = DECAY ** rank[:, -1]
    is_new = ~is_first[:, -1]
    pressed = (grown * torch.where(is_last[..., None], overwritten, 0.0)).sum(dim=1)
    return SlotAllocation(
        importance=shrunk[:, None, None] * (before + added)[:, -1],
        pressure=shrunk[:, None] * (torch.where(is_new[:, None], 0.0, use.pressure) + pressed),
        age=torch.where(is_new[:, None, None], 0.0, use.age),
        active=torch.where(is_new[:, None, None], start.to(dtype), use.active),
    )


def _documents(starts: Tensor | None, before: Tensor, use: SlotAllocation) -> tuple[Tensor, Tensor, Tensor]:
    """Of every token: whether its text is the carried one [B,T], the sums [B,T,H,M] `before` its text began, and
    whether its text is the last one [B,T].
    """
    if starts is None:
        every = torch.ones(before.shape[:2], dtype=torch.bool, device=before.device)
        return every, torch.zeros_like(before), every
    number = starts.cumsum(dim=1)
    # sums only grow, so the latest start's is the largest
    since = torch.where(starts[..., None, None], before, 0.0).cummax(dim=1).values
    return number == 0, since, number == number[:, -1:]


def _is_unwritten(counted: Tensor, starts: Tensor) -> Tensor:
    """[B,T] bool: tokens of texts that begin here, with no counted token of their text before them.

    The sums before them are zero; a difference of two sums leaves a rounding error, whose share of another is no ratio.
    """
    num_before = counted.cumsum(dim=1) - counted.long()
    num_at_start = torch.where(starts, num_before, 0).cummax(dim=1).values
    return (starts.cumsum(dim=1) > 0) & (num_before == num_at_start)


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    return torch.where(whole > 0, part / torch.where(whole > 0, whole, 1.0), 0.0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AllocationRule:
    """What happens at a boundary; see ModelConfig for the numbers."""

    min_slots: int
    prune_share: float
    prune_age: int
    allocate_pressure: float

    @classmethod
    def of(cls, config: ModelConfig) -> AllocationRule:
        return cls(**{field.name: getattr(config, field.name) for field in dataclasses.fields(cls)})

    @torch.no_grad()
    def apply(self, use: SlotAllocation, exists: Tensor | None = None) -> tuple[SlotAllocation, Tensor]:
        """The use after a boundary, and the slots that were pruned, [B,H,M] bool; those start anew when taken again.

        `exists` [B,1,M] bool: slots that may be taken at all. Ties never decide anything: pruning goes from the highest
        slot down, allocation from the lowest up.
        """
        active = use.mask
        age = torch.where(active, (use.age.round() + 1).clamp(max=self.prune_age + 1), 0.0)
        count = active.sum(dim=-1, keepdim=True)
        mean = _ratio(torch.where(active, use.importance, 0.0).sum(dim=-1, keepdim=True), count.to(age.dtype))
        weak = active & (use.importance < self.prune_share * mean) & (age > self.prune_age)
        pruned = weak & (_rank_from_end(weak) <= count - self.min_slots)
        free = ~active if exists is None else ~active & exists
        is_pressed = (use.pressure > self.allocate_pressure)[..., None]
        taken = free & is_pressed & (free.cumsum(dim=-1) <= MAX_ALLOCATED)
        return SlotAllocation(
            importance=torch.where(active & ~pruned, use.importance, 0.0),
            pressure=use.pressure,
            age=torch.where(pruned, 0.0, age),
            active=((active & ~pruned) | taken).to(use.active.dtype),
        ), pruned


def _rank_from_end(chosen: Tensor) -> Tensor:
    """[..., M] bool -> 1 for the last that is chosen, 2 for the one before it."""
    return chosen.flip(-1).cumsum(dim=-1).flip(-1)
