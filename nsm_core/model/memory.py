"""An external memory as a layer: rows found by content, or free rows taken in turn (benchmarks/notes/layers.md).

The Neural Turing Machine (Graves et al. 2014) with the allocation of its successor (2016), in chunks of the text: what
writes is a summary of the last `gate_chunk` tokens, so that reading stays parallel between boundaries.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsm_core.config import ModelConfig
from nsm_core.model.chunk_alignment import ChunkAlignment, align_chunks, open_chunk
from nsm_core.model.mixer import Mixer, init_projections
from nsm_core.model.segments import Segments
from nsm_core.ops.slot_scan.chunked import CHUNK_LEN
from nsm_core.state.spec import State

READ_STRENGTH = 5.0  # at the start, of cosines


class Rows(NamedTuple):
    """memory [B,R,N], usage [B,R] in [0, 1]: how fully and how lately a row was written."""

    memory: Tensor
    usage: Tensor


class WriteHeads(nn.Module):
    """What summaries of tokens do to the rows, one head after the other."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        heads, width, self.num_rows = config.memory_heads, config.memory_width, config.memory_rows
        self.width, self.eps = width, config.norm_eps
        self.controls = nn.Parameter(torch.randn(heads, width, 3 * width + 3) * width**-0.5)
        bias = torch.zeros(heads, 3 * width + 3)
        bias[:, width : 2 * width] = 2.0  # a row that is written is replaced at the start
        bias[:, -3] = 4.0  # found by a clear likeness
        bias[:, -1] = -1.0  # and rather one that is free than one that is alike
        self.bias = nn.Parameter(bias)
        self.decay = math.exp(-heads / self.num_rows)  # of usage: 1/e after as many writes as there are rows

    def forward(self, summary: Tensor, weight: Tensor, number: Tensor, rows: Rows) -> Rows:
        """summary [B,P,N] of tokens that weigh `weight` [B,P] together; nothing is written where they weigh nothing.

        `number` [B] int64: boundaries of the text before this one.
        """
        normed = F.rms_norm(summary, (self.width,), eps=self.eps)
        controls = torch.einsum("bpn,pnc->bpc", normed, self.controls) + self.bias
        key, erase, candidate, rest = torch.split(controls, [self.width, self.width, self.width, 3], dim=-1)
        erase, candidate = torch.sigmoid(erase), torch.tanh(candidate)
        strength = 1.0 + F.softplus(rest[..., 0])
        strong, by_content = -torch.expm1(-weight) * torch.sigmoid(rest[..., 1]), torch.sigmoid(rest[..., 2])
        memory, usage = rows
        for head in range(summary.shape[1]):
            content = (strength[:, head, None] * cosine(key[:, head, None], memory)[:, 0]).softmax(dim=-1)
            share = by_content[:, head, None]
            allocated = self.allocation(usage, number * summary.shape[1] + head)
            address = strong[:, head, None] * (share * content + (1.0 - share) * allocated)
            # erase and add with the same gate: a convex step, so that no row grows
            memory = memory + address[..., None] * erase[:, head, None] * (candidate[:, head, None] - memory)
            usage = usage + address - usage * address
        return Rows(memory, usage * self.decay)

    def allocation(self, usage: Tensor, turn: Tensor) -> Tensor:
        """usage [B,R] -> weights [B,R] of sum at most 1; `turn` [B]: writes before this one.

        Rows come in turn; a row in use passes the rest on to the next. The literature sorts by
        usage, which feeds rounding back into who is chosen: see benchmarks/notes/layers.md.
        """
        ring = torch.arange(self.num_rows, device=usage.device)
        order = (ring + turn[:, None]) % self.num_rows
        used = usage.gather(1, order)
        passed_on = F.pad(used.cumprod(dim=1)[:, :-1], (1, 0), value=1.0)
        return ((1.0 - used) * passed_on).gather(1, (ring - turn[:, None]) % self.num_rows)


def cosine(queries: Tensor, memory: Tensor) -> Tensor:
    """queries [B,Q,N], memory [B,R,N] -> [B,Q,R]."""
    return F.normalize(queries, dim=-1) @ F.normalize(memory, dim=-1).transpose(-1, -2)


class MemoryMixer(Mixer):
    """Tokens read the rows as of the last boundary. A boundary writes a summary of the tokens since the one before.

    Boundaries are multiples of `gate_chunk` in the text, wherever calls begin and end. The state: memory and usage, and
    the sums since the boundary of the tokens' content for each write head [P,N], and of their counts [P].
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d, self.heads, self.width = config.d_model, config.num_heads, config.memory_width
        self.write_heads, self.eps, self.chunk = config.memory_heads, config.norm_eps, config.gate_chunk
        read_width = self.heads * self.width
        self.parts = [read_width, self.write_heads * self.width, read_width]
        self.project = nn.Linear(d, sum(self.parts), bias=False)  # queries, content for the write heads, output gate
        self.count = nn.Linear(d, self.write_heads)  # how much a token counts in a summary
        self.write = WriteHeads(config)
        self.log_strength = nn.Parameter(torch.full((self.heads,), math.log(READ_STRENGTH)))
        self.initial_memory = nn.Parameter(0.5 * torch.randn(config.memory_rows, self.width))
        self.out_norm = nn.Parameter(torch.ones(read_width))
        self.out = nn.Linear(read_width, d, bias=False)
        init_projections(self.project, out=self.out)
        nn.init.normal_(self.count.weight, std=0.1 * d**-0.5)
        nn.init.zeros_(self.count.bias)

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        rows, width = self.initial_memory.shape
        heads = self.write_heads
        return {"memory": (rows, width), "usage": (rows,), "sums": (heads, width), "weights": (heads,)}

    def initial_state(self, batch_size: int) -> State:
        device = self.out.weight.device
        state = {name: torch.zeros(batch_size, *shape, device=device) for name, shape in self.state_shapes().items()}
        start = self._start(torch.float32)
        return state | {name: value.expand_as(state[name]).clone() for name, value in start._asdict().items()}

    def _start(self, dtype: torch.dtype) -> Rows:
        memory = self.initial_memory.to(dtype)
        return Rows(memory, torch.zeros_like(memory[:, 0]))

    def forward(self, x: Tensor, state: State, segments: Segments) -> tuple[Tensor, State]:
        queries, content, gate = self.project(x).split(self.parts, dim=-1)
        alignment = align_chunks(x.shape[1], self.chunk, segments)
        sums, weights = self._summed(x, content, state, alignment, segments)
        chunked = alignment.to_chunks(torch.unflatten(queries, -1, (self.heads, self.width)).to(sums.dtype))
        numbers = self._numbers(alignment, segments.positions)
        rows, reads = Rows(state["memory"], state["usage"]), []
        with torch.autocast(x.device.type, enabled=False):
            for index, part in enumerate(torch.split(chunked, self.chunk, dim=1)):
                rows = self._restarted(rows, segments.reset, index)
                reads.append(self._read(part, rows.memory))
                total = weights[:, index]
                after = self.write(sums[:, index] / (total[..., None] + 1e-6), total, numbers[:, index], rows)
                is_whole = alignment.end >= (index + 1) * self.chunk
                rows = _choose(is_whole, after, rows)
        read = alignment.from_chunks(torch.cat(reads, dim=1), x.shape[1])
        end = alignment.end // self.chunk
        last = {"sums": open_chunk(sums, end), "weights": open_chunk(weights, end), **rows._asdict()}
        return self._output(read, gate), {name: last[name].to(state[name].dtype) for name in state}

    def step(self, x: Tensor, state: State, positions: Tensor) -> tuple[Tensor, State]:
        out, new_state = self.forward(x[:, None], state, Segments(positions[:, None]))
        return out[:, 0], new_state

    def _summed(
        self, x: Tensor, content: Tensor, state: State, alignment: ChunkAlignment, segments: Segments
    ) -> tuple[Tensor, Tensor]:
        """Sums of content [B,n,P,N] and of counts [B,n,P] in each chunk, with those of its tokens before this call."""
        dtype = state["sums"].dtype
        with torch.autocast(x.device.type, enabled=False):
            counts = torch.sigmoid(self.count(x.to(self.count.weight.dtype))).to(dtype)
            if segments.valid is not None:
                counts = torch.where(segments.valid[..., None], counts, 0.0)
            chunks = (alignment.num_chunks, self.chunk)
            counts = torch.unflatten(alignment.to_chunks(counts), 1, chunks)
            content = torch.unflatten(alignment.to_chunks(content.to(dtype)), 1, chunks)
            content = torch.unflatten(content, -1, (self.write_heads, self.width))
            sums, weights = torch.einsum("bncp,bncpw->bnpw", counts, content), counts.sum(dim=2)
        before = {name: state[name] for name in ("sums", "weights")}
        if segments.reset is not None:  # of another text
            begins = segments.reset[:, 0]
            before = {name: torch.where(_per_row(begins, value), 0.0, value) for name, value in before.items()}
        sums[:, 0] += before["sums"]
        weights[:, 0] += before["weights"]
        return sums, weights

    def _numbers(self, alignment: ChunkAlignment, positions: Tensor) -> Tensor:
        """[B,n] int64: the number of each complete chunk in its text."""
        last = alignment.source[:, self.chunk - 1 :: self.chunk].clamp(0, positions.shape[1] - 1)
        return positions.gather(1, last) // self.chunk

    def _restarted(self, rows: Rows, reset: Tensor | None, index: int) -> Rows:
        """A text that starts at this chunk starts from the learned rows."""
        chunks_per_flag = CHUNK_LEN // self.chunk
        if reset is None or index % chunks_per_flag:
            return rows
        return _choose(reset[:, index // chunks_per_flag], self._start(rows.memory.dtype), rows)

    def _read(self, queries: Tensor, memory: Tensor) -> Tensor:
        """queries [B,C,H,N] -> their results [B,C,H,N]."""
        alike = cosine(queries.flatten(1, 2), memory)
        strength = self.log_strength.exp().repeat(queries.shape[1])[:, None]
        return torch.unflatten((strength * alike).softmax(dim=-1) @ memory, 1, queries.shape[1:3])

    def _output(self, read: Tensor, gate: Tensor) -> Tensor:
        normed = F.rms_norm(read, (self.width,), eps=self.eps).flatten(-2) * self.out_norm
        out: Tensor = self.out(normed.to(gate.dtype) * F.silu(gate))
        return out


def _per_row(rows: Tensor, like: Tensor) -> Tensor:
    return rows.view(-1, *[1] * (like.dim() - 1))


def _choose(rows: Tensor, new: Rows, old: Rows) -> Rows:
    """`new` for the rows [B] bool of the batch that are named."""
    return Rows(*(torch.where(_per_row(rows, before), after, before) for after, before in zip(new, old, strict=True)))
