"""RWKV-7 "Goose" (Peng et al. 2025, arXiv 2503.14456): a matrix state changed by a generalised delta rule."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsm_core.config import ModelConfig
from nsm_core.model.segments import Segments, first_tokens, valid_tokens
from nsm_core.ops.short_conv.reference import next_tail
from nsm_core.state.spec import State
from nsm_lab.baselines.baseline import Baseline, linear, silenced, zero_linear
from nsm_lab.baselines.delta_rule import delta_rule
from nsm_lab.baselines.rwkv7_scan.operator import has_kernel, scan_kernel

RANK = 32  # of the small networks behind decay and learning rate, as in the published models up to width 768
GATE_RANK = 64
NORM_EPS = 64e-5
FIRST_DECAY, LAST_DECAY = -5.0, 1.0  # of a head's channels, before the sigmoid: short and long memories


class Rwkv7(Baseline):
    """The time mix. Heads of K channels; S <- S diag(w) - S kappa^T (a * kappa) + v^T k, transposed here.

    Left out: the values of the first layer, which the published model mixes into those of the others (a layer
    here sees nothing of another), and its channel mix, in whose place is the feed-forward part that all layers have.
    State: `matrix` [H, K, K] and `previous` [1, d], the token before, for the token shift.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d = config.d_model
        self.heads, self.head_dim = config.num_heads, config.head_dim
        ramp = torch.linspace(0.0, 1.0, d)
        self.mix = nn.Parameter((1.0 - ramp).expand(6, d).clone())  # of r, w, k, v, a, g with the token before
        self.receptance, self.key, self.value = (linear(d, d) for _ in range(3))
        decay = FIRST_DECAY + (LAST_DECAY - FIRST_DECAY) * torch.linspace(0.0, 1.0, self.head_dim)
        self.decay_bias = nn.Parameter(decay.repeat(self.heads))
        self.decay_in, self.decay_out = linear(d, RANK), zero_linear(RANK, d)
        self.rate_bias = nn.Parameter(torch.zeros(d))
        self.rate_in, self.rate_out = linear(d, RANK), zero_linear(RANK, d)
        self.gate_in, self.gate_out = linear(d, GATE_RANK), linear(GATE_RANK, d)
        self.removal = nn.Parameter(torch.full((d,), 0.85))  # xi: how the removed key differs from the written one
        self.replacement = nn.Parameter(torch.ones(d))  # alpha: how much of the rate goes into the written key
        self.bonus = nn.Parameter(torch.zeros(self.heads, self.head_dim))
        self.out_norm, self.out_bias = nn.Parameter(torch.ones(d)), nn.Parameter(torch.zeros(d))
        self.out = zero_linear(d, d)

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"matrix": (self.heads, self.head_dim, self.head_dim), "previous": (1, self.out.weight.shape[0])}

    def forward(self, x: Tensor, state: State, segments: Segments) -> tuple[Tensor, State]:
        joined = torch.cat((state["previous"].to(x.dtype), x), dim=1)
        shifted = joined[:, :-1]
        if segments.reset is not None:
            shifted = torch.where(first_tokens(segments.reset)[..., None], 0.0, shifted)
        mixed = x + (shifted - x) * self.mix.to(x.dtype)[:, None, None]  # [6,B,T,d]
        tokens = self._tokens(mixed, state["matrix"].dtype, valid_tokens(x.shape[1], segments))
        with torch.autocast(x.device.type, enabled=False):
            y, matrix = _scan(tokens, state["matrix"], segments.reset)
            bonus = (tokens["r"] * tokens["k"] * self.bonus).sum(-1, keepdim=True) * tokens["v"]
            normed = F.layer_norm(y, (self.head_dim,), eps=NORM_EPS).flatten(-2) * self.out_norm + self.out_bias
            read = normed + bonus.flatten(-2)
        gate = self.gate_out(torch.sigmoid(self.gate_in(mixed[5])))
        previous = next_tail(joined, 1, segments.lengths).to(state["previous"].dtype)
        return self.out(read.to(gate.dtype) * gate), {"matrix": matrix, "previous": previous}

    def _tokens(self, mixed: Tensor, dtype: torch.dtype, valid: Tensor | None) -> dict[str, Tensor]:
        """What `delta_rule` reads, each [B,T,H,K]."""
        r, k, v = self.receptance(mixed[0]), self.key(mixed[2]), self.value(mixed[3])
        decay, rate = self.decay_out(torch.tanh(self.decay_in(mixed[1]))), self.rate_out(self.rate_in(mixed[4]))
        r, k, v, decay, rate = (x.to(dtype) for x in (r, k, v, decay, rate))
        log_w = -math.exp(-0.5) * torch.sigmoid(decay + self.decay_bias)
        rate = torch.sigmoid(rate + self.rate_bias)
        removed = F.normalize(self._in_heads(k * self.removal), dim=-1)
        written = k * (1.0 + (rate - 1.0) * self.replacement)
        parts = (self._in_heads(log_w), self._in_heads(written), removed * self._in_heads(rate))
        log_w, written, added = silenced(valid, *parts)
        return {
            "r": self._in_heads(r), "log_w": log_w, "k": written, "v": self._in_heads(v), "a": -removed, "b": added,
        }  # fmt: skip

    def _in_heads(self, x: Tensor) -> Tensor:
        return torch.unflatten(x, -1, (self.heads, self.head_dim))


def _scan(tokens: dict[str, Tensor], state: Tensor, reset: Tensor | None) -> tuple[Tensor, Tensor]:
    """As `delta_rule`, which computes it where the kernels do not."""
    if not has_kernel(tokens["r"]):
        return delta_rule(**tokens, state=state, reset=reset)
    r, k, v = tokens["r"], tokens["k"], tokens["v"]
    w, removed = tokens["log_w"].exp(), -tokens["a"]
    return scan_kernel(r=r, w=w, k=k, v=v, removed=removed, added=tokens["b"], state=state, reset=reset)
