"""Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464): the delta rule with one decay a head."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsm_core.config import ModelConfig
from nsm_core.model.segments import Segments, valid_tokens
from nsm_core.ops.keyed_scan.dispatch import keyed_scan
from nsm_core.ops.short_conv.reference import convolve, next_tail
from nsm_core.state.spec import State
from nsm_lab.baselines.baseline import Baseline, linear, silenced, zero_linear

STEP_RANGE = (0.001, 0.1)  # of the decay's discretisation at the start
DECAY_RANGE = (1.0, 16.0)


class GatedDeltaNet(Baseline):
    """Queries, keys and values through short convolutions and SiLU, queries and keys of unit length; RMSNorm and gate.

    Heads of `num_memory_slots` key and `slot_width` value channels: a state of the same size as that of keyed slots.
    State: `matrix` [H, M, V] and `conv_tail`.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d, self.heads, self.eps = config.d_model, config.num_heads, config.norm_eps
        self.slots, self.width = config.num_memory_slots, config.slot_width or config.head_dim
        keys, values = self.heads * self.slots, self.heads * self.width
        self.sizes = [keys, keys, values]
        self.project, self.gate = linear(d, sum(self.sizes)), linear(d, values)
        self.conv_weight = nn.Parameter(torch.randn(config.conv_taps, sum(self.sizes)) * config.conv_taps**-0.5)
        self.rates = linear(d, 2 * self.heads)  # of a head: strength, decay
        low, high = (math.log(bound) for bound in STEP_RANGE)
        step = torch.linspace(low, high, self.heads).exp()
        self.step_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus
        self.log_decay = nn.Parameter(torch.linspace(*DECAY_RANGE, self.heads).log())
        self.out_norm = nn.Parameter(torch.ones(self.width))
        self.out = zero_linear(values, d)

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        taps, channels = self.conv_weight.shape
        return {"matrix": (self.heads, self.slots, self.width), "conv_tail": (taps - 1, channels)}

    def forward(self, x: Tensor, state: State, segments: Segments) -> tuple[Tensor, State]:
        mixed, tail = self.project(x), state["conv_tail"]
        with torch.autocast(x.device.type, enabled=False):
            joined = torch.cat((tail.to(mixed.dtype), mixed), dim=1)
            convolved = F.silu(convolve(joined.to(tail.dtype), self.conv_weight, segments.reset))
            q, k, v = (
                torch.unflatten(part, -1, (self.heads, -1)) for part in torch.split(convolved, self.sizes, dim=-1)
            )
            strength, step = self.rates(x.to(self.rates.weight.dtype)).chunk(2, dim=-1)
            decay = -self.log_decay.exp() * F.softplus(step + self.step_bias)
            strength, decay = silenced(valid_tokens(x.shape[1], segments), torch.sigmoid(strength), decay)
            q, k, v = (part.to(mixed.dtype) for part in (F.normalize(q, dim=-1), F.normalize(k, dim=-1), v))
            y, matrix = keyed_scan(
                q=q, k=k, v=v, strength=strength, log_decay=decay, state=state["matrix"], reset=segments.reset
            )
            normed = F.rms_norm(y.to(tail.dtype), (self.width,), eps=self.eps) * self.out_norm
        read = normed.flatten(-2).to(mixed.dtype) * F.silu(self.gate(x))
        new_tail = next_tail(joined, tail.shape[1], segments.lengths).to(tail.dtype)
        return self.out(read), {"matrix": matrix, "conv_tail": new_tail}
