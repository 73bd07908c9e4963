"""The PULSE linear-gate layer: routed slot memory (docs/model.md, equations 1-6)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsm_core.config import ModelConfig
from nsm_core.model.mixer import Mixer, init_projections
from nsm_core.model.router import build_router
from nsm_core.model.segments import Segments
from nsm_core.ops.short_conv.conv import short_conv
from nsm_core.ops.short_conv.reference import value_conv
from nsm_core.ops.slot_scan.dispatch import slot_scan
from nsm_core.ops.slot_scan.inputs import ScanInputs
from nsm_core.ops.slot_scan.step import slot_step
from nsm_core.state.spec import State


class ShortConv(nn.Module):
    """Equation (1) after the projection: convolution over a few tokens, SiLU, heads, norm of queries and keys."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads, self.eps = config.num_heads, config.norm_eps
        weight = 0.1 * torch.randn(config.conv_taps, 3 * config.d_model)
        weight[-1] += 0.7
        self.weight = nn.Parameter(weight)

    def forward(
        self, qkv: Tensor, tail: Tensor, *, reset: Tensor | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """qkv [B,T,3d], tail [B,taps-1,3d] -> q, k, v [B,T,H,K] and the tail after each row's last token."""
        return short_conv(
            qkv=qkv, weight=self.weight, tail=tail, num_heads=self.num_heads, eps=self.eps, reset=reset, lengths=lengths
        )


class ValueConv(nn.Module):
    """The same for slots that are read without queries and keys: values alone."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        weight = 0.1 * torch.randn(config.conv_taps, config.d_model)
        weight[-1] += 0.7
        self.weight = nn.Parameter(weight)

    def forward(
        self, v: Tensor, tail: Tensor, *, reset: Tensor | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """v [B,T,d], tail [B,taps-1,d] -> v [B,T,H,K] and the tail after each row's last token."""
        return value_conv(v=v, weight=self.weight, tail=tail, num_heads=self.num_heads, reset=reset, lengths=lengths)


class ReadBias(nn.Module):
    """x [..., d] -> read logits of the token's own [..., H, M], whatever the slots hold."""

    def __init__(self, config: ModelConfig, std: float) -> None:
        super().__init__()
        self.heads = config.num_heads
        self.logits = nn.Linear(config.d_model, self.heads * config.num_memory_slots, bias=False)
        nn.init.normal_(self.logits.weight, std=std)

    def forward(self, x: Tensor) -> Tensor:
        return torch.unflatten(self.logits(x), -1, (self.heads, -1))


class PulseMixer(Mixer):
    """Routed slot memory: conv, sparse convex writes, softmax read, output gate.

    The projector defines the read logits: `attention` compares queries with the slots' keys, `direct` goes
    by a linear map of the token alone, and its slots have no keys, `hybrid` by the sum of the two.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d, heads, slots, head_dim = config.d_model, config.num_heads, config.num_memory_slots, config.head_dim
        self.heads, self.head_dim, self.eps = heads, head_dim, config.norm_eps
        is_direct = config.projector == "direct"
        self.conv: ShortConv | ValueConv = ValueConv(config) if is_direct else ShortConv(config)
        self.project = nn.Linear(d, self.conv.weight.shape[1] + d, bias=False)  # q, k, v (or v) and the output gate z
        self.router = build_router(config)
        self.log_scale = None if is_direct else nn.Parameter(torch.zeros(heads))
        self.read_bias = None
        if config.projector != "attention":
            self.read_bias = ReadBias(config, std=d**-0.5 if is_direct else 0.0)
        initial = torch.zeros(heads, slots, head_dim if is_direct else 2 * head_dim)
        if not is_direct:
            initial[..., :head_dim].normal_(std=0.5)
        self.initial_slots = nn.Parameter(initial)
        self.out_norm = nn.Parameter(torch.ones(d))
        self.out = nn.Linear(d, d, bias=False)
        init_projections(self.project, out=self.out)

    @property
    def scale(self) -> Tensor:
        if self.log_scale is None:  # no keys to compare with
            return torch.ones(self.heads, device=self.initial_slots.device)
        return self.log_scale.exp() * (2.0 / math.sqrt(self.head_dim))

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        taps, channels = self.conv.weight.shape
        return {"slots": tuple(self.initial_slots.shape), "conv_tail": (taps - 1, channels)}

    def initial_state(self, batch_size: int) -> State:
        slots = self.initial_slots.to(torch.float32)
        tail = torch.zeros(batch_size, *self.state_shapes()["conv_tail"], device=slots.device)
        return {"slots": slots.expand(batch_size, -1, -1, -1).clone(), "conv_tail": tail}

    def _output(self, read: Tensor, gate: Tensor) -> Tensor:
        normed = F.rms_norm(read, (self.head_dim,), eps=self.eps).flatten(-2) * self.out_norm
        out: Tensor = self.out(normed * F.silu(gate))
        return out

    def forward(self, x: Tensor, state: State, segments: Segments) -> tuple[Tensor, State]:
        """state: slots [B,H,M,2K], conv_tail [B,taps-1,3d]; without keys K and d."""
        tokens, gate, tail = self._tokens(x, state["conv_tail"], segments.reset, segments.lengths)
        existing = segments.existing(self.initial_slots.shape[1])
        tokens["log_decay"] = self._route(x, segments.valid, None if existing is None else existing[:, None])
        read, slots = self._scan(tokens, state["slots"], segments)
        return self._output(read, gate), {"slots": slots, "conv_tail": tail}

    def _tokens(
        self, x: Tensor, tail: Tensor, reset: Tensor | None = None, lengths: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """What tokens x [B,T,d] bring: v, and where the projector uses them q, k and read_bias; gate and new tail."""
        mixed, gate = self.project(x).split((self.conv.weight.shape[1], x.shape[-1]), dim=-1)
        *parts, tail = self.conv(mixed, tail, reset=reset, lengths=lengths)
        tokens = dict(zip(("v", "k", "q"), reversed(parts), strict=False))
        if self.read_bias is not None:
            tokens["read_bias"] = self.read_bias(x)
        return tokens, gate, tail

    def _route(self, x: Tensor, valid: Tensor | None = None, active: Tensor | None = None) -> Tensor:
        """Log decay of all slots [..., H, M]: see Router."""
        log_decay: Tensor = self.router(x, valid, active)
        return log_decay

    def _scan(self, tokens: dict[str, Tensor], slots: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        """What tokens read (those of `_tokens`, log_decay [B,T,H,M]), and the slots after the last."""
        existing = segments.existing(slots.shape[2])
        return slot_scan(
            ScanInputs(
                **tokens,
                scale=self.scale,
                state=slots,
                reset=segments.reset,
                initial=self.initial_slots,
                active=None if existing is None else existing.expand(slots.shape[:3]),
            )
        )

    def step(self, x: Tensor, state: State, positions: Tensor) -> tuple[Tensor, State]:
        tokens, gate, tail = self._tokens(x[:, None], state["conv_tail"])
        token = {name: value[:, 0] for name, value in tokens.items()}
        write = -torch.expm1(self._route(x))
        read, slots = slot_step(**token, write=write, scale=self.scale, state=state["slots"])
        return self._output(read, gate[:, 0]), {"slots": slots, "conv_tail": tail}
