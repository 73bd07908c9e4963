"""A layer whose slots are changed by a gate that reads them, every `gate_chunk` tokens (benchmarks/notes/layers.md)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsm_core.config import ModelConfig
from nsm_core.model.chunk_alignment import ChunkAlignment, align_chunks, open_chunk
from nsm_core.model.gates import GATES
from nsm_core.model.mixer import Mixer, init_projections
from nsm_core.model.pulse import ShortConv
from nsm_core.model.router import build_router
from nsm_core.model.segments import Segments
from nsm_core.ops.slot_scan.chunked import CHUNK_LEN
from nsm_core.state.spec import State


class GatedMixer(Mixer):
    """Tokens are routed to slots and summed until the next boundary, where a gate changes the slots.

    Between boundaries a token reads the slots as they were at the last one, and the last `gate_chunk` tokens
    themselves, in one softmax. Boundaries are multiples of `gate_chunk` in the text: where a call begins or ends
    changes nothing. The state: slots and, for the LSTM, cells [H,M,K]; the sums since the boundary, of values and of
    weights; the tokens still in view, as a ring of keys and values; the convolution's tail.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d, heads, head_dim = config.d_model, config.num_heads, config.head_dim
        self.heads, self.head_dim, self.eps, self.chunk = heads, head_dim, config.norm_eps, config.gate_chunk
        self.project = nn.Linear(d, 4 * d, bias=False)  # q, k, v and the output gate z
        self.conv = ShortConv(config)
        self.router = build_router(config)
        self.gate = GATES[config.gate](config)
        self.slot_keys = nn.Parameter(torch.randn(heads, head_dim, head_dim) * head_dim**-0.5)
        self.log_scale = nn.Parameter(torch.zeros(heads))
        self.initial_slots = nn.Parameter(0.5 * torch.randn(heads, config.num_memory_slots, head_dim))
        self.out_norm = nn.Parameter(torch.ones(d))
        self.out = nn.Linear(d, d, bias=False)
        init_projections(self.project, out=self.out)

    @property
    def scale(self) -> Tensor:
        return self.log_scale.exp() * (2.0 / math.sqrt(self.head_dim))

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        slots: tuple[int, ...] = tuple(self.initial_slots.shape)
        taps, channels = self.conv.weight.shape
        shapes: dict[str, tuple[int, ...]] = {"gated": slots, "sums": slots, "weights": slots[:2]}
        shapes |= {"cells": slots} if self.gate.has_cell else {}
        return shapes | {"recent": (self.chunk, self.heads, 2 * self.head_dim), "conv_tail": (taps - 1, channels)}

    def initial_state(self, batch_size: int) -> State:
        device = self.out.weight.device
        state = {name: torch.zeros(batch_size, *shape, device=device) for name, shape in self.state_shapes().items()}
        state["gated"] = self.initial_slots.float().expand(batch_size, -1, -1, -1).clone()
        return state

    def forward(self, x: Tensor, state: State, segments: Segments) -> tuple[Tensor, State]:
        qkv, z = self.project(x).split((3 * x.shape[-1], x.shape[-1]), dim=-1)
        q, k, v, tail = self.conv(qkv, state["conv_tail"], reset=segments.reset, lengths=segments.lengths)
        # scaled before the masks: the gradient of a scale that meets -inf is not a number
        q = q * self.scale[:, None].to(q.dtype)
        alignment = align_chunks(x.shape[1], self.chunk, segments)
        weights = alignment.to_chunks(-self.router(x, segments.valid))
        recent = self._columns(torch.cat((k, v), dim=-1).to(state["recent"].dtype), state["recent"], alignment)
        chunked = alignment.to_chunks(q)
        local = self._local_scores(chunked, recent, alignment, segments)
        read, changed = self._walk(q=chunked, local=local, recent=recent, weights=weights, alignment=alignment,
                                   state=state, reset=segments.reset)  # fmt: skip
        read = alignment.from_chunks(read, x.shape[1])
        changed |= {"recent": self._as_ring(recent, alignment), "conv_tail": tail}
        return self._output(read, z), {name: changed[name].to(state[name].dtype) for name in state}

    def step(self, x: Tensor, state: State, positions: Tensor) -> tuple[Tensor, State]:
        out, new_state = self.forward(x[:, None], state, Segments(positions[:, None]))
        return out[:, 0], new_state

    def _columns(self, kv: Tensor, ring: Tensor, alignment: ChunkAlignment) -> Tensor:
        """Keys and values [B, (n + 1) * C, H, 2K]: the chunk before the call's first one, then all columns.

        The ring has position p at index p % C. Indices before `offset` belong to the call's first chunk, the others to
        the chunk before it.
        """
        chunked = alignment.to_chunks(kv)
        is_before = torch.arange(self.chunk, device=ring.device) < alignment.offset[:, None]
        first = torch.where(is_before[..., None, None], ring, chunked[:, : self.chunk])
        return torch.cat((ring, first, chunked[:, self.chunk :]), dim=1)

    def _as_ring(self, recent: Tensor, alignment: ChunkAlignment) -> Tensor:
        row = torch.arange(self.chunk, device=recent.device)
        column = alignment.end[:, None] - 1 - (alignment.end[:, None] - 1 - row) % self.chunk
        return torch.take_along_dim(recent, (column + self.chunk)[..., None, None], dim=1)

    def _local_scores(self, q: Tensor, recent: Tensor, alignment: ChunkAlignment, segments: Segments) -> Tensor:
        """Read logits [B,n,H,C,2C] of a chunk's tokens for those of it and the chunk before; -inf: not seen."""
        chunk, n = self.chunk, alignment.num_chunks
        keys = recent[..., : self.head_dim].unfold(1, 2 * chunk, chunk)  # [B,n,H,K,2C]
        queries = torch.unflatten(q, 1, (n, chunk)).transpose(2, 3)
        distance = torch.arange(chunk, device=q.device)[:, None] + chunk - torch.arange(2 * chunk, device=q.device)
        positions = alignment.to_chunks(segments.positions)
        near = (distance >= 0) & (distance < chunk)
        seen = near & (distance <= torch.unflatten(positions, 1, (n, chunk))[..., None])
        return (queries.to(keys.dtype) @ keys).masked_fill(~seen[:, :, None], -torch.inf)

    def _walk(
        self, *, q: Tensor, local: Tensor, recent: Tensor, weights: Tensor, alignment: ChunkAlignment, state: State,
        reset: Tensor | None,
    ) -> tuple[Tensor, State]:  # fmt: skip
        """Chunk after chunk: the reads [B, n * C, H, K], and slots, cells and sums after each row's last token."""
        chunk, n = self.chunk, alignment.num_chunks
        values = recent[..., self.head_dim :].unfold(1, 2 * chunk, chunk).transpose(-1, -2)  # [B,n,H,2C,K]
        routed = torch.unflatten(weights.to(recent.dtype), 1, (n, chunk)).permute(0, 1, 3, 4, 2)  # [B,n,H,M,C]
        sums, totals = routed @ values[..., chunk:, :], routed.sum(dim=-1)
        sums[:, 0] += state["sums"]
        totals[:, 0] += state["weights"]
        slots, cells = state["gated"], state.get("cells", state["gated"])
        queries = torch.unflatten(q.to(recent.dtype), 1, (n, chunk)).transpose(2, 3)
        reads = []
        with torch.autocast(q.device.type, enabled=False):
            for index in range(n):
                if reset is not None:
                    slots, cells = self._restart(slots, cells, reset, index)
                reads.append(self._read(queries[:, index], local[:, index], values[:, index], slots))
                is_whole = (alignment.end >= (index + 1) * chunk)[:, None, None, None]
                update = sums[:, index] / (totals[:, index, ..., None] + 1e-6)
                coverage = -torch.expm1(-totals[:, index, ..., None])
                changed, new_cells = self.gate(update, coverage, slots, cells)
                slots, cells = torch.where(is_whole, changed, slots), torch.where(is_whole, new_cells, cells)
        last = {"sums": open_chunk(sums, alignment.end // chunk), "weights": open_chunk(totals, alignment.end // chunk)}
        return torch.stack(reads, dim=1).flatten(1, 2), {"gated": slots, "cells": cells, **last}

    def _restart(self, slots: Tensor, cells: Tensor, reset: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """A text that starts at this chunk starts from the learned slots."""
        chunks_per_flag = CHUNK_LEN // self.chunk
        if index % chunks_per_flag:
            return slots, cells
        starts = reset[:, index // chunks_per_flag, None, None, None]
        fresh = torch.zeros_like(cells) if self.gate.has_cell else cells
        return torch.where(starts, self.initial_slots.to(slots.dtype), slots), torch.where(starts, fresh, cells)

    def _read(self, q: Tensor, local: Tensor, values: Tensor, slots: Tensor) -> Tensor:
        """One softmax over tokens in view and slots: q [B,H,C,K], local [B,H,C,2C] -> [B,C,H,K]."""
        normed = F.rms_norm(slots, (self.head_dim,), eps=self.eps)
        keys = F.rms_norm(normed @ self.slot_keys, (self.head_dim,), eps=self.eps)
        logits = torch.cat((local, q @ keys.transpose(-1, -2)), dim=-1)
        parts = [local.shape[-1], slots.shape[-2]]
        on_tokens, on_slots = torch.split(logits.softmax(dim=-1), parts, dim=-1)
        read: Tensor = on_tokens @ values + on_slots @ normed
        return read.transpose(1, 2)

    def _output(self, read: Tensor, z: Tensor) -> Tensor:
        normed = F.rms_norm(read, (self.head_dim,), eps=self.eps).flatten(-2) * self.out_norm
        out: Tensor = self.out(normed.to(z.dtype) * F.silu(z))
        return out
