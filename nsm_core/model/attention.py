"""Softmax attention over the last tokens of the text, as a layer with a fixed-size state: its key-value cache."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsm_core.config import ModelConfig
from nsm_core.model.mixer import Mixer, init_projections
from nsm_core.model.segments import Segments, documents_of
from nsm_core.state.spec import State


def rotary(positions: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary embedding (Su et al. 2021), [..., K/2] fp32, for positions [...].

    Angles are taken in fp64: at position 1e6 an fp32 angle is off by a twentieth of a radian.
    """
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64) / head_dim
    angles = positions[..., None].double() * base**-exponents
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., H, K]; cos, sin [..., K/2]. Halves of a head are rotated against each other, in fp32."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


# See `attend`
Attend = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def attend(q: Tensor, kv: Tensor, mask: Tensor | None) -> Tensor:
    """q [B,T,H,K], scaled; kv [B,Hkv,2,S,K]; mask [B or 1, T, S] bool (None: causal, T = S) -> [B,T,H K]."""
    k, v = (x.repeat_interleave(q.shape[2] // kv.shape[1], dim=1) for x in kv.unbind(dim=2))
    mask = None if mask is None else mask[:, None]
    read = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask, is_causal=mask is None, scale=1.0)
    return read.transpose(1, 2).flatten(-2)


class WindowAttention(Mixer):
    """A token attends to itself and to the `window` tokens before it; grouped keys and values, QK-norm, rotary.

    The state is a ring: entry p % window holds the key (rotated) and the value of the token at position p, for the last
    `window` of them; entries from before the text's start do not count. So a turn changes as many places as
    it has tokens, and a key-value head is one block of memory.
    """

    def __init__(self, config: ModelConfig, window: int) -> None:
        super().__init__()
        self.window, self.heads, self.kv_heads = window, config.num_heads, config.num_kv_heads
        self.head_dim, self.eps, self.rope_base = config.head_dim, config.norm_eps, config.rope_base
        d, kv_width = config.d_model, self.kv_heads * self.head_dim
        self.project = nn.Linear(d, d + 2 * kv_width, bias=False)
        self.log_scale = nn.Parameter(torch.zeros(self.heads))
        self.out = nn.Linear(d, d, bias=False)
        self.attend: Attend = attend  # over several tokens; executors may replace it
        init_projections(self.project, out=self.out)

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"kv": (self.kv_heads, 2, self.window, self.head_dim)}

    def initial_state(self, batch_size: int) -> State:
        return {"kv": torch.zeros(batch_size, *self.state_shapes()["kv"], device=self.log_scale.device)}

    def queries_and_memory(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """x [B,T,d] -> q [B,T,H,K], scaled, and kv [B,Hkv,2,T,K]; queries and keys normed and rotated."""
        kv_width = self.kv_heads * self.head_dim
        q, k, v = self.project(x).split((x.shape[-1], kv_width, kv_width), dim=-1)
        cos, sin = rotary(positions, self.head_dim, self.rope_base)
        q = rotate(self._normed(q, self.heads), cos, sin)
        k = rotate(self._normed(k, self.kv_heads), cos, sin)
        scale = (self.log_scale.exp() / math.sqrt(self.head_dim))[:, None]
        kv = torch.stack((k, torch.unflatten(v, -1, (self.kv_heads, self.head_dim))), dim=2)  # [B,T,2,Hkv,K]
        return q * scale.to(q.dtype), kv.permute(0, 3, 2, 1, 4)

    def _normed(self, x: Tensor, heads: int) -> Tensor:
        return F.rms_norm(torch.unflatten(x, -1, (heads, self.head_dim)), (self.head_dim,), eps=self.eps)

    def forward(self, x: Tensor, state: State, segments: Segments) -> tuple[Tensor, State]:
        """state: kv [B,Hkv,2,window,K]."""
        q, kv = self.queries_and_memory(x, segments.positions)
        num_tokens, ring = x.shape[1], state["kv"]
        joined = torch.cat((self._in_order(ring, segments).to(kv.dtype), kv), dim=3)
        if segments.is_fresh and num_tokens <= self.window:
            read = self.attend(q, kv, self._fresh_mask(segments))
        elif num_tokens > self.window and num_tokens % self.window == 0:
            read = self._attend_in_blocks(q, joined, segments)
        else:
            read = self.attend(q, joined, self._mask(segments, num_tokens))
        out: Tensor = self.out(read)
        return out, {"kv": self._as_ring(joined, segments).to(ring.dtype)}

    def step(self, x: Tensor, state: State, positions: Tensor) -> tuple[Tensor, State]:
        """Reads the ring as it lies: no copy of keys or values, and none for each query head."""
        q, new = self.queries_and_memory(x[:, None], positions[:, None])
        ring = state["kv"]
        q = torch.unflatten(q[:, 0], 1, (self.kv_heads, -1))  # [B,Hkv,heads of a group,K]
        scores = (q @ ring[:, :, 0].transpose(-1, -2)).masked_fill(~self._in_text(positions)[:, None, None], -torch.inf)
        own = q @ new[:, :, 0].transpose(-1, -2)
        weights = torch.cat((scores, own), dim=-1).softmax(dim=-1)
        read = weights[..., :-1] @ ring[:, :, 1] + weights[..., -1:] * new[:, :, 1]
        row = (positions % self.window)[:, None, None, None, None].expand_as(new)
        return self.out(read.flatten(1)), {"kv": ring.scatter(3, row, new.to(ring.dtype))}

    def _in_text(self, positions: Tensor) -> Tensor:
        """[B, window]: the ring's entries that hold a token of the text, before the token at `positions` [B]."""
        row = torch.arange(self.window, device=positions.device)
        return (positions[:, None] - 1 - row) % self.window < positions[:, None]

    def _in_order(self, ring: Tensor, segments: Segments) -> Tensor:
        """The ring before the first of the tokens, oldest token first."""
        index = torch.arange(self.window, device=ring.device) + segments.positions[:, :1]
        return _gather(ring, index % self.window)

    def _fresh_mask(self, segments: Segments) -> Tensor | None:
        """[B,T,T], None for plain causal attention."""
        if segments.reset is None:
            return None
        document = documents_of(segments.reset)
        return (document[:, :, None] == document[:, None, :]).tril()

    def _mask(self, segments: Segments, num_tokens: int) -> Tensor:
        """[B, T, window + T]: who sees whom among the cached tokens and the new ones."""
        query = torch.arange(num_tokens, device=segments.positions.device)
        key = torch.arange(-self.window, num_tokens, device=query.device)
        distance = query[:, None] - key
        near = (distance >= 0) & (distance <= self.window)
        # Positions count from the start of a document: entries further back belong to another text, or to none.
        return near & (distance <= segments.positions[:, :, None])

    def _attend_in_blocks(self, q: Tensor, joined: Tensor, segments: Segments) -> Tensor:
        """The same with T a multiple of the window: block i needs the keys of blocks i - 1 and i only."""
        window, num_blocks = self.window, q.shape[1] // self.window
        pairs = joined.unfold(3, 2 * window, window).permute(0, 3, 1, 2, 5, 4)  # [B, n, Hkv, 2, 2 window, K]
        query = torch.arange(window, device=q.device)
        distance = query[:, None] + window - torch.arange(2 * window, device=q.device)
        near = (distance >= 0) & (distance <= window)
        blocks = (num_blocks, window)
        mask = near & (distance <= torch.unflatten(segments.positions, 1, blocks)[..., None])
        read = self.attend(torch.unflatten(q, 1, blocks).flatten(0, 1), pairs.flatten(0, 1), mask.flatten(0, 1))
        return torch.unflatten(read, 0, (-1, num_blocks)).flatten(1, 2)

    def _as_ring(self, joined: Tensor, segments: Segments) -> Tensor:
        """The ring after each row's last token; joined [B,Hkv,2, window + T, K], oldest token first."""
        index = (torch.arange(self.window, device=joined.device) - segments.end[:, None]) % self.window
        num_read = joined.shape[3] - self.window if segments.lengths is None else segments.lengths[:, None]
        return _gather(joined, index + num_read)


def _gather(kv: Tensor, index: Tensor) -> Tensor:
    """kv [B,Hkv,2,S,K], index [B,W] -> [B,Hkv,2,W,K]."""
    return torch.take_along_dim(kv, index[:, None, None, :, None], dim=3)
