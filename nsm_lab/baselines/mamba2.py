"""Mamba-2 (Dao and Gu 2024, arXiv 2405.21060): a selective state space with one decay a head."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsm_core.config import ModelConfig
from nsm_core.model.segments import Segments, valid_tokens
from nsm_core.state.spec import State
from nsm_lab.baselines.baseline import Baseline, causal_conv, linear, silenced, zero_linear
from nsm_lab.baselines.linear_attention import linear_attention

EXPAND = 2
STEP_RANGE = (0.001, 0.1)  # of the discretisation at the start
DECAY_RANGE = (1.0, 16.0)


class Mamba2(Baseline):
    """S <- exp(-A dt) S + dt B x^T, y = C^T S + D x, then RMSNorm(y * SiLU(z)).

    Width 2d, twice as many heads as the model, one group of B and C of `num_memory_slots` numbers each: a state of the
    same size as that of our slots. State: `ssm` [2H, M, K] and `conv_tail`.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.inner, self.size, self.eps = EXPAND * config.d_model, config.num_memory_slots, config.norm_eps
        self.heads, self.head_dim = EXPAND * config.num_heads, config.head_dim
        channels = self.inner + 2 * self.size
        self.project = linear(config.d_model, self.inner + channels + self.heads)  # z; x, B, C; dt
        self.conv_weight = nn.Parameter(torch.randn(config.conv_taps, channels) * config.conv_taps**-0.5)
        self.conv_bias = nn.Parameter(torch.zeros(channels))
        low, high = (math.log(bound) for bound in STEP_RANGE)
        step = torch.linspace(low, high, self.heads).exp()
        self.step_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus
        self.log_decay = nn.Parameter(torch.linspace(*DECAY_RANGE, self.heads).log())
        self.skip = nn.Parameter(torch.ones(self.heads))
        self.out_norm = nn.Parameter(torch.ones(self.inner))
        self.out = zero_linear(self.inner, config.d_model)

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        taps, channels = self.conv_weight.shape
        return {"ssm": (self.heads, self.size, self.head_dim), "conv_tail": (taps - 1, channels)}

    def forward(self, x: Tensor, state: State, segments: Segments) -> tuple[Tensor, State]:
        ssm = state["ssm"]
        z, mixed, step = self.project(x).split((self.inner, self.conv_weight.shape[1], self.heads), dim=-1)
        with torch.autocast(x.device.type, enabled=False):
            mixed, tail = causal_conv(mixed, self.conv_weight, state["conv_tail"], segments)
            inner, write, read = torch.split(F.silu(mixed + self.conv_bias), [self.inner, self.size, self.size], dim=-1)
            inner = torch.unflatten(inner, -1, (self.heads, self.head_dim))
            step = F.softplus(step.to(ssm.dtype) + self.step_bias)
            step, write = silenced(valid_tokens(x.shape[1], segments), step, write)
            y, ssm = linear_attention(
                q=read[:, :, None], k=write[:, :, None], v=inner * step[..., None],
                log_decay=-self.log_decay.exp() * step, state=ssm, reset=segments.reset,
            )  # fmt: skip
            gated = (y + self.skip[:, None] * inner).flatten(-2) * F.silu(z.to(y.dtype))
            normed = F.rms_norm(gated, (self.inner,), eps=self.eps) * self.out_norm
        return self.out(normed.to(z.dtype)), {"ssm": ssm, "conv_tail": tail}
