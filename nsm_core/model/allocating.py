"""Slot memory whose slots come and go at boundaries of the text: benchmarks/notes/layers.md."""

from __future__ import annotations

import torch
from torch import Tensor

from nsm_core.config import ModelConfig
from nsm_core.model.allocation import AllocationRule, SlotAllocation, Tokens, follow
from nsm_core.model.boundaries import Piece, may_be_any, pieces
from nsm_core.model.communicating import Communication
from nsm_core.model.pulse import PulseMixer
from nsm_core.model.segments import Segments, first_tokens
from nsm_core.ops.slot_scan.chunked import slot_scan_with_reads
from nsm_core.ops.slot_scan.inputs import ScanInputs
from nsm_core.ops.slot_scan.step import slot_step_with_reads
from nsm_core.state.spec import State


class AllocatingMixer(PulseMixer):
    """PulseMixer in which some slots may be out of use: neither written nor read, and at their learned start.

    After every `communication_interval` tokens of the text slots are pruned and allocated, see AllocationRule. With
    `is_communicating` those in use have exchanged their contents just before.
    """

    def __init__(self, config: ModelConfig, *, is_communicating: bool = False) -> None:
        super().__init__(config)
        self.interval = config.communication_interval
        self.num_started = config.start_slots or config.num_memory_slots
        self.rule = AllocationRule.of(config)
        self.communication = Communication(config) if is_communicating else None

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        heads, slots = self.initial_slots.shape[:2]
        use = {"importance": (heads, slots), "pressure": (heads,), "age": (heads, slots), "active": (heads, slots)}
        return {**super().state_shapes(), **use}

    def initial_state(self, batch_size: int) -> State:
        device = self.initial_slots.device
        shapes = {name: self.state_shapes()[name] for name in SlotAllocation._fields}
        use = {name: torch.zeros(batch_size, *shape, device=device) for name, shape in shapes.items()}
        use["active"][..., : self.num_started] = 1.0
        return {**super().initial_state(batch_size), **use}

    def forward(self, x: Tensor, state: State, segments: Segments) -> tuple[Tensor, State]:
        """state: as of PulseMixer, and the tensors of SlotAllocation."""
        tokens, gate, tail = self._tokens(x, state["conv_tail"], segments.reset, segments.lengths)
        tokens["x"] = x
        slots, use, reads = state["slots"], self._existing(SlotAllocation.of(state), segments), []
        for piece in pieces(segments, self.interval):
            own = {name: value[:, piece.tokens] for name, value in tokens.items()}
            read, slots, use = self._read_piece(own, slots, use, piece)
            reads.append(read)
        return self._output(torch.cat(reads, dim=1), gate), {"slots": slots, "conv_tail": tail, **use._asdict()}

    def _existing(self, use: SlotAllocation, segments: Segments) -> SlotAllocation:
        """Without the slots that are not there for this row."""
        exists = segments.existing(use.active.shape[-1])
        return use if exists is None else use._replace(active=torch.where(exists, use.active, 0.0))

    def _read_piece(
        self, tokens: dict[str, Tensor], slots: Tensor, use: SlotAllocation, piece: Piece
    ) -> tuple[Tensor, Tensor, SlotAllocation]:
        """Tokens up to a row's boundary, the boundary itself, and the tokens after it."""
        read, slots, use = self._read_some(tokens, slots, use, piece, piece.before)
        if not piece.may_have_boundary:
            return read, slots, use
        slots, use = self._cross(slots, use, piece.has_boundary, piece.segments)
        later, slots, use = self._read_some(tokens, slots, use, piece, ~piece.before)
        return torch.where(piece.before[..., None, None], read, later), slots, use

    def _read_some(
        self, tokens: dict[str, Tensor], slots: Tensor, use: SlotAllocation, piece: Piece, mask: Tensor
    ) -> tuple[Tensor, Tensor, SlotAllocation]:
        """Only tokens of the mask [B,T] write and count, and only texts that start at one of them start."""
        given, segments = dict(tokens), piece.segments
        counted = mask if segments.valid is None else mask & segments.valid
        if segments.lengths is not None:
            counted = counted & (torch.arange(mask.shape[1], device=mask.device) < segments.lengths[:, None])
        reset, start = piece.starts(mask), self._started(segments, use)
        starts = None if reset is None else first_tokens(reset)
        active = use.mask[:, None]
        if starts is not None:
            active = torch.where((starts.cumsum(dim=1) > 0)[..., None, None], start[:, None], active)
        log_decay = self.router(given.pop("x"), counted, active)
        given["read_bias"] = _masked(given.get("read_bias"), active, log_decay)
        inputs = ScanInputs(
            **given, log_decay=log_decay, scale=self.scale, state=slots, reset=reset, initial=self.initial_slots
        )
        out, slots, read = slot_scan_with_reads(inputs)
        did = Tokens(-torch.expm1(log_decay), read, counted, starts)
        return out, slots, follow(use, did, start)

    def _started(self, segments: Segments, use: SlotAllocation) -> Tensor:
        """[B,H,M] bool: the slots in use at the start of a text."""
        exists = segments.existing(use.active.shape[-1])
        started = torch.arange(use.active.shape[-1], device=use.active.device) < self.num_started
        return (started if exists is None else started & exists).expand_as(use.active)

    def _cross(
        self, slots: Tensor, use: SlotAllocation, rows: Tensor, segments: Segments
    ) -> tuple[Tensor, SlotAllocation]:
        """A boundary, for the `rows` [B] bool that are at one."""
        changed = slots if self.communication is None else self.communication(slots, use.mask)
        after, pruned = self.rule.apply(use, segments.existing(use.active.shape[-1]))
        changed = torch.where(pruned[..., None], self.initial_slots.to(slots.dtype), changed)
        crossed = (_choose(rows, new, old) for new, old in zip(after, use, strict=True))
        return _choose(rows, changed, slots), SlotAllocation(*crossed)

    def step(self, x: Tensor, state: State, positions: Tensor) -> tuple[Tensor, State]:
        tokens, gate, tail = self._tokens(x[:, None], state["conv_tail"])
        token = {name: value[:, 0] for name, value in tokens.items()}
        use = SlotAllocation.of(state)
        write = -torch.expm1(self.router(x, active=use.mask))
        token["read_bias"] = _masked(token.get("read_bias"), use.mask, write)
        out, slots, read = slot_step_with_reads(**token, write=write, scale=self.scale, state=state["slots"])
        counted = torch.ones(x.shape[0], 1, dtype=torch.bool, device=x.device)
        use = follow(use, Tokens(write[:, None], read[:, None], counted), use.mask)
        is_boundary = (positions + 1) % self.interval == 0
        if may_be_any(is_boundary):
            slots, use = self._cross(slots, use, is_boundary, Segments(positions[:, None]))
        return self._output(out, gate[:, 0]), {"slots": slots, "conv_tail": tail, **use._asdict()}


def _masked(read_bias: Tensor | None, active: Tensor, like: Tensor) -> Tensor:
    """Read logits, or their bias, with unused slots masked."""
    given = torch.zeros_like(like) if read_bias is None else read_bias
    return given.masked_fill(~active, -torch.inf)


def _choose(rows: Tensor, new: Tensor, old: Tensor) -> Tensor:
    return torch.where(rows.view(-1, *[1] * (old.dim() - 1)), new, old)
