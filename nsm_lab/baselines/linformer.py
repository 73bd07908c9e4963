"""Linformer (Wang et al. 2020, arXiv 2006.04768) in a causal form: learned projections of completed blocks."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsm_core.config import ModelConfig
from nsm_core.model.attention import rotary, rotate
from nsm_core.model.chunk_alignment import ChunkAlignment, align_chunks
from nsm_core.model.segments import Segments, documents_of
from nsm_core.ops.slot_scan.chunked import CHUNK_LEN
from nsm_core.state.spec import State
from nsm_lab.baselines.baseline import Baseline, linear, zero_linear

BLOCK_LEN, BLOCK_ROWS = CHUNK_LEN, 16  # tokens of a block, and keys and values that stand for it afterwards


class Linformer(Baseline):
    """softmax(q (E K)^T) (F V), where E and F project along the text.

    The published layer projects the whole text at once and so is not causal. Here each block of 64 tokens is projected
    to 16 rows once it is complete, by the same E and F; a token attends to the rows of all completed blocks among the
    last `max_context` tokens, and to the tokens of its own block up to itself. State: `blocks` [blocks, 16, H, 2K],
    block i at place i % blocks, and `recent` [64, H, 2K], the token at position p at place p % 64.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        config.require_rotary()
        d = config.d_model
        self.heads, self.head_dim, self.eps = config.num_heads, config.head_dim, config.norm_eps
        self.rope_base, self.num_blocks = config.rope_base, max(1, config.max_context // BLOCK_LEN)
        self.project = linear(d, 3 * d)
        self.compress = nn.Parameter(torch.randn(2, BLOCK_ROWS, BLOCK_LEN) * BLOCK_LEN**-0.5)  # E and F
        self.log_scale = nn.Parameter(torch.zeros(self.heads))
        self.out = zero_linear(d, d)

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        token = (self.heads, 2 * self.head_dim)
        return {"blocks": (self.num_blocks, BLOCK_ROWS, *token), "recent": (BLOCK_LEN, *token)}

    def forward(self, x: Tensor, state: State, segments: Segments) -> tuple[Tensor, State]:
        ring = state["recent"]
        projected = self.project(x)
        with torch.autocast(x.device.type, enabled=False):
            q, kv = self._heads(projected.to(ring.dtype), segments)
            alignment = align_chunks(x.shape[1], BLOCK_LEN, segments)
            columns = self._columns(kv, ring, alignment)
            chunked = torch.unflatten(columns[:, BLOCK_LEN:], 1, (alignment.num_chunks, BLOCK_LEN))  # [B,n,C,H,2K]
            rows = self._compressed(chunked)
            read = self._attend(
                alignment.to_chunks(q), chunked, torch.cat((state["blocks"], rows), dim=1), alignment, segments
            )
            read = alignment.from_chunks(read, x.shape[1]).flatten(-2)
            new_state = {
                "blocks": self._next_blocks(state["blocks"], rows, alignment, segments),
                "recent": _next_recent(columns, alignment),
            }
        return self.out(read.to(projected.dtype)), new_state

    def _heads(self, x: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        """x [B,T,3d] -> q [B,T,H,K], scaled, and keys beside values [B,T,H,2K]."""
        q, k, v = torch.unflatten(x, -1, (3, self.heads, self.head_dim)).unbind(2)
        angles = rotary(segments.positions, self.head_dim, self.rope_base)
        q, k = (rotate(F.rms_norm(part, (self.head_dim,), eps=self.eps), *angles) for part in (q, k))
        return q * (self.log_scale.exp() / math.sqrt(self.head_dim))[:, None], torch.cat((k, v), dim=-1)

    def _columns(self, kv: Tensor, ring: Tensor, alignment: ChunkAlignment) -> Tensor:
        """[B, (n + 1) * C, H, 2K]: the ring, then the blocks of the call, the first filled up from the ring."""
        chunked = alignment.to_chunks(kv)
        is_before = torch.arange(BLOCK_LEN, device=ring.device) < alignment.offset[:, None]
        first = torch.where(is_before[..., None, None], ring, chunked[:, :BLOCK_LEN])
        return torch.cat((ring, first, chunked[:, BLOCK_LEN:]), dim=1)

    def _compressed(self, chunked: Tensor) -> Tensor:
        """[B,n,C,H,2K] -> [B,n,rows,H,2K]."""
        weights = self.compress.to(chunked.dtype)
        parts = zip(chunked.chunk(2, dim=-1), weights, strict=True)
        return torch.cat([torch.einsum("rc,bnchk->bnrhk", weight, part) for part, weight in parts], dim=-1)

    def _attend(
        self, q: Tensor, chunked: Tensor, rows: Tensor, alignment: ChunkAlignment, segments: Segments
    ) -> Tensor:
        """One softmax over a block's tokens and the rows of blocks before it: q [B, n * C, H, K] -> the same shape."""
        n = alignment.num_chunks
        queries = torch.unflatten(q, 1, (n, BLOCK_LEN)).transpose(2, 3)  # [B,n,H,C,K]
        keys, values = chunked.transpose(2, 3).chunk(2, dim=-1)
        row_keys, row_values = (x.transpose(1, 2)[:, None] for x in rows.flatten(1, 2).chunk(2, dim=-1))  # [B,1,H,R,K]
        is_later = torch.ones(BLOCK_LEN, BLOCK_LEN, dtype=torch.bool, device=q.device).triu(1)
        near = (queries @ keys.transpose(-1, -2)).masked_fill(is_later, -torch.inf)
        seen = self._seen_blocks(alignment, segments).repeat_interleave(BLOCK_ROWS, dim=2)[:, :, None, None]
        far = (queries @ row_keys.transpose(-1, -2)).masked_fill(~seen, -torch.inf)
        weights = torch.cat((near, far), dim=-1).softmax(dim=-1)
        read = weights[..., :BLOCK_LEN] @ values + weights[..., BLOCK_LEN:] @ row_values
        return read.transpose(2, 3).flatten(1, 2)

    def _seen_blocks(self, alignment: ChunkAlignment, segments: Segments) -> Tensor:
        """[B, n, blocks + n]: which blocks, of the ring and of the call, a block of the call sees."""
        n, device = alignment.num_chunks, segments.positions.device
        first = (segments.positions[:, 0] // BLOCK_LEN)[:, None]
        stored = _latest(first - 1, self.num_blocks)  # [B, blocks]: the numbers of the ring's blocks
        block = torch.arange(n, device=device)
        age = first[..., None] + block[:, None] - stored[:, None]
        of_ring = (stored >= 0)[:, None] & (age <= self.num_blocks)
        lag = block[:, None] - block
        of_call = ((lag > 0) & (lag <= self.num_blocks)).expand(first.shape[0], n, n)
        if segments.reset is not None:
            document = documents_of(segments.reset)[:, ::BLOCK_LEN]
            of_ring = of_ring & (document == 0)[..., None]
            of_call = of_call & (document[:, :, None] == document[:, None, :])
        return torch.cat((of_ring, of_call), dim=2)

    def _next_blocks(self, blocks: Tensor, rows: Tensor, alignment: ChunkAlignment, segments: Segments) -> Tensor:
        """The ring after each row's last token: completed blocks of the call, older ones, zero before the text."""
        num_complete = (segments.end // BLOCK_LEN)[:, None]
        number = _latest(num_complete - 1, self.num_blocks)
        column = number - num_complete + (alignment.end // BLOCK_LEN)[:, None]
        new = torch.take_along_dim(rows, column.clamp(0, rows.shape[1] - 1)[..., None, None, None], dim=1)
        updated = torch.where((column >= 0)[..., None, None, None], new, blocks)
        return torch.where((number >= 0)[..., None, None, None], updated, 0.0)


def _latest(last: Tensor, size: int) -> Tensor:
    """last [B,1] -> [B,size]: at place p of a ring, the largest number up to `last` that is p modulo `size`."""
    return last - (last - torch.arange(size, device=last.device)) % size


def _next_recent(columns: Tensor, alignment: ChunkAlignment) -> Tensor:
    index = torch.arange(BLOCK_LEN, device=columns.device)
    column = alignment.end[:, None] - 1 - (alignment.end[:, None] - 1 - index) % BLOCK_LEN
    return torch.take_along_dim(columns, (column + BLOCK_LEN)[..., None, None], dim=1)
