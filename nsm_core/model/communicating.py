"""Slot memory whose slots exchange content at boundaries of the text: benchmarks/notes/layers.md."""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsm_core.config import ModelConfig
from nsm_core.model.boundaries import Piece, may_be_any, pieces, stretches
from nsm_core.model.pulse import PulseMixer
from nsm_core.model.router import NEVER, build_router
from nsm_core.model.segments import Segments
from nsm_core.ops.routing.reference import write_distribution
from nsm_core.ops.slot_scan.dispatch import slot_scan
from nsm_core.ops.slot_scan.inputs import ScanInputs
from nsm_core.ops.slot_scan.summary import slot_summary
from nsm_core.state.spec import State

KEY_WIDTH = 32  # of the projections that slots compare each other by
START = -2.0  # sigmoid of it: the share of a slot that others replace at the start of training


class Communication(nn.Module):
    """Attention between the slots of a head: each moves some of the way to a mean of those it attends to.

    Both banks by the same weights, so that keys and values stay aligned. A convex mix: the slots stay in the hull of
    the written values.

    Slots of the upper level, the last `upper_slots`, take from those of the lower level alone.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        heads, self.head_dim, self.eps = config.num_heads, config.head_dim, config.norm_eps
        self.top_k, self.taper = config.communication_top_k, config.taper
        self.queries = nn.Parameter(torch.randn(heads, self.head_dim, KEY_WIDTH) * self.head_dim**-0.5)
        self.keys = nn.Parameter(torch.randn(heads, self.head_dim, KEY_WIDTH) * self.head_dim**-0.5)
        self.share = nn.Parameter(torch.full((heads,), START))
        self.num_upper = config.upper_slots
        self.upper_share = nn.Parameter(torch.full((heads,), START)) if self.num_upper else None

    def forward(self, slots: Tensor, active: Tensor | None = None, links: Tensor | None = None) -> Tensor:
        """slots [B,H,M,2K] fp32 -> the same after one exchange, of those that are `active` [B,H,M] bool (None: all).

        `links` [B,H,M,M] is added to the logits by which slots attend, for slots known to belong together.
        """
        with torch.autocast(slots.device.type, enabled=False):
            mixed = torch.lerp(slots, self.weights(slots, active, links) @ slots, self._shares(slots.shape[-2]))
            return mixed if active is None else torch.where(active[..., None], mixed, slots)

    def _shares(self, num_slots: int) -> Tensor:
        """[H, M or 1, 1]: how much of a slot is replaced."""
        shares = self.share[:, None]
        if self.upper_share is not None:
            lower = shares.expand(-1, num_slots - self.num_upper)
            shares = torch.cat((lower, self.upper_share[:, None].expand(-1, self.num_upper)), dim=1)
        return torch.sigmoid(shares)[..., None]

    def weights(self, slots: Tensor, active: Tensor | None = None, links: Tensor | None = None) -> Tensor:
        """[B,H,M,M]: how much slot m takes from each; rows sum to 1, with top_k at most that many are not zero."""
        normed = F.rms_norm(slots[..., : self.head_dim], (self.head_dim,), eps=self.eps)
        logits = (normed @ self.queries) @ (normed @ self.keys).transpose(-1, -2) / math.sqrt(KEY_WIDTH)
        if links is not None:
            logits = logits + links
        if active is not None:
            logits = logits.masked_fill(~active[..., None, :], NEVER)
        if self.num_upper:
            is_upper = torch.arange(slots.shape[-2], device=slots.device) >= slots.shape[-2] - self.num_upper
            logits = logits.masked_fill(is_upper[:, None] & is_upper, NEVER)
        if self.top_k in (0, slots.shape[-2]):
            return logits.softmax(dim=-1)
        # tapered like the router's choice: rounding must not switch a partner on or off
        no_bias = logits.new_zeros(())
        return write_distribution(logits=logits, selection_bias=no_bias, top_k=self.top_k, taper=self.taper)


def _lower_level(config: ModelConfig) -> ModelConfig:
    """As if there were only the slots that tokens write to."""
    lower = config.num_memory_slots - config.upper_slots
    top_k = lower if config.router == "sigmoid" else config.write_top_k
    return dataclasses.replace(config, num_memory_slots=lower, write_top_k=top_k, upper_slots=0)


class _Half:
    """The tokens before or after the exchanges of all stretches, as rows [B n, interval]; the others write nothing."""

    def __init__(self, rows: dict[str, Tensor], mask: Tensor, reset: Tensor | None, initial: Tensor) -> None:
        self.tokens = {**rows, "log_decay": torch.where(mask[..., None, None], rows["log_decay"], 0.0)}
        self.reset, self.initial = reset, initial

    def summary(self, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """What each stretch does to the slots: decay [B,n,H,M,1] and update [B,n,H,M,2K]."""
        own = {name: self.tokens[name] for name in ("v", "k", "log_decay") if name in self.tokens}
        decay, update = slot_summary(**own, reset=self.reset, initial=self.initial)
        return torch.unflatten(decay, 0, shape)[..., None], torch.unflatten(update, 0, shape)

    def read(self, starts: list[Tensor], scale: Tensor, active: Tensor | None) -> Tensor:
        """What the tokens read [B n, interval, H, K] on slots [B,H,M,2K] at the start of each stretch."""
        state = torch.stack(starts, dim=1).flatten(0, 1)
        read, _ = slot_scan(
            ScanInputs(**self.tokens, scale=scale, state=state, reset=self.reset, initial=self.initial, active=active)
        )
        return read


class CommunicatingMixer(PulseMixer):
    """PulseMixer with an exchange after every `communication_interval` tokens of the text.

    With an upper level of slots, which change in exchanges alone: a compressed memory of the lower level.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.interval = config.communication_interval
        self.communication = Communication(config)
        self.num_upper = config.upper_slots
        if self.num_upper:
            self.router = build_router(_lower_level(config))

    def _route(self, x: Tensor, valid: Tensor | None = None, active: Tensor | None = None) -> Tensor:
        """Tokens write to no slot of the upper level."""
        return F.pad(super()._route(x, valid, active), (0, self.num_upper))

    def _scan(self, tokens: dict[str, Tensor], slots: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        """All whole stretches of `interval` tokens together, then the rest: each has at most one exchange in a row."""
        count, reads = segments.positions.shape[1] // self.interval, []
        if count > 1:
            read, slots = self._scan_stretches(tokens, slots, segments, count)
            reads.append(read)
        for piece in pieces(segments, self.interval, count * self.interval if count > 1 else 0):
            read, slots = self._scan_piece({name: x[:, piece.tokens] for name, x in tokens.items()}, slots, piece)
            reads.append(read)
        return torch.cat(reads, dim=1), slots

    def _scan_stretches(
        self, tokens: dict[str, Tensor], slots: Tensor, segments: Segments, count: int
    ) -> tuple[Tensor, Tensor]:
        """The slots from exchange to exchange, in order, then the reads of all tokens, in parallel."""
        shape, existing = (len(slots), count), segments.existing(slots.shape[2])
        split = stretches(segments, self.interval, count)
        rows = {
            name: torch.unflatten(x[:, : count * self.interval], 1, (count, self.interval)).flatten(0, 1)
            for name, x in tokens.items()
        }
        halves = [_Half(rows, mask, reset, self.initial_slots) for mask, reset in split.halves()]
        (decay, update), (later_decay, later_update) = (half.summary(shape) for half in halves)
        before, after = [], []
        for number in range(count):
            before.append(slots)
            slots = torch.addcmul(update[:, number], decay[:, number], slots)
            exchanged = self.communication(slots, existing)
            slots = torch.where(split.has_boundary[:, number, None, None, None], exchanged, slots)
            after.append(slots)
            slots = torch.addcmul(later_update[:, number], later_decay[:, number], slots)
        active = None if existing is None else existing.expand(slots.shape[:3]).repeat_interleave(count, dim=0)
        read = halves[0].read(before, self.scale, active)
        if may_be_any(~split.before):
            later = halves[1].read(after, self.scale, active)
            read = torch.where(split.before.flatten(0, 1)[..., None, None], read, later)
        return torch.unflatten(read, 0, shape).flatten(1, 2), slots

    def _scan_piece(self, tokens: dict[str, Tensor], slots: Tensor, piece: Piece) -> tuple[Tensor, Tensor]:
        """Tokens up to a row's exchange, the exchange, and the tokens after it."""
        read, slots = self._scan_some(tokens, slots, piece, piece.before)
        if not piece.may_have_boundary:
            return read, slots
        exchanged = self.communication(slots, piece.segments.existing(slots.shape[2]))
        slots = torch.where(piece.has_boundary[:, None, None, None], exchanged, slots)
        later, slots = self._scan_some(tokens, slots, piece, ~piece.before)
        return torch.where(piece.before[..., None, None], read, later), slots

    def _scan_some(self, tokens: dict[str, Tensor], slots: Tensor, piece: Piece, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Only tokens of the mask [B,T] write, and only texts that start at one of them start."""
        log_decay = torch.where(mask[..., None, None], tokens["log_decay"], 0.0)
        existing = piece.segments.existing(slots.shape[2])
        return slot_scan(
            ScanInputs(
                **{**tokens, "log_decay": log_decay},
                scale=self.scale,
                state=slots,
                reset=piece.starts(mask),
                initial=self.initial_slots,
                active=None if existing is None else existing.expand(slots.shape[:3]),
            )
        )

    def step(self, x: Tensor, state: State, positions: Tensor) -> tuple[Tensor, State]:
        out, new_state = super().step(x, state, positions)
        is_boundary = ((positions + 1) % self.interval == 0)[:, None, None, None]
        if may_be_any(is_boundary):
            slots = new_state["slots"]
            new_state["slots"] = torch.where(is_boundary, self.communication(slots), slots)
        return out, new_state
