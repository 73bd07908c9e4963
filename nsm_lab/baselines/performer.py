"""Performer (Choromanski et al. 2021, arXiv 2009.14794): causal attention by positive random features, FAVOR+."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nsm_core.config import ModelConfig
from nsm_core.model.attention import rotary, rotate
from nsm_core.model.segments import Segments, valid_tokens
from nsm_core.state.spec import State
from nsm_lab.baselines.baseline import Baseline, linear, silenced, zero_linear
from nsm_lab.baselines.linear_attention import linear_attention


class Performer(Baseline):
    """phi(x) = exp(W x - |x|^2 / 2) / sqrt(F) with orthogonal rows W; y = phi(q) S / phi(q) z, S and z sums over keys.

    Queries and keys are normed, so the exponent needs no maximum over the text, which a causal sum could not know. The
    features are drawn once. Their number is twice that of the slots: a state of nearly the same size. The state holds S
    and z as means over the tokens read, so that no number of it grows with the text: `means` [H, F, K + 1].
    """

    label = "Performer"
    features: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        config.require_rotary()
        self.heads, self.head_dim, self.eps = config.num_heads, config.head_dim, config.norm_eps
        self.rope_base, self.size = config.rope_base, 2 * config.num_memory_slots
        self.project = linear(config.d_model, 3 * config.d_model)
        self.out = zero_linear(config.d_model, config.d_model)
        self.register_buffer("features", torch.stack([self._orthogonal() for _ in range(self.heads)]))

    def _orthogonal(self) -> Tensor:
        """[F,K]: blocks of K orthogonal rows, each as long as one of independent normal numbers."""
        size, width = self.size, self.head_dim
        blocks = [torch.linalg.qr(torch.randn(width, width, device="cpu"))[0] for _ in range(-(-size // width))]
        lengths = torch.randn(size, width, device="cpu").norm(dim=1, keepdim=True)
        rows: Tensor = torch.cat(blocks)[:size] * lengths
        return rows

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"means": (self.heads, self.size, self.head_dim + 1)}

    def forward(self, x: Tensor, state: State, segments: Segments) -> tuple[Tensor, State]:
        means = state["means"]
        projected = self.project(x)
        with torch.autocast(x.device.type, enabled=False):
            q, k, v = torch.unflatten(projected.to(means.dtype), -1, (3, self.heads, self.head_dim)).unbind(2)
            angles = rotary(segments.positions, self.head_dim, self.rope_base)
            q, k = self._phi(rotate(self._normed(q), *angles)), self._phi(rotate(self._normed(k), *angles))
            (k,) = silenced(valid_tokens(x.shape[1], segments), k)
            v = torch.cat((v, torch.ones_like(v[..., :1])), dim=-1)
            sums, no_decay = means * _count(segments.positions[:, 0]), torch.zeros_like(v[..., 0])
            y, sums = linear_attention(q=q, k=k, v=v, log_decay=no_decay, state=sums, reset=segments.reset)
            read = (y[..., :-1] / y[..., -1:].clamp(min=1e-12)).flatten(-2)
            end = sums / _count(segments.end)
        if segments.lengths is not None:  # to the bit, where nothing was read
            end = torch.where((segments.lengths > 0)[:, None, None, None], end, means)
        return self.out(read.to(projected.dtype)), {"means": end}

    def _normed(self, x: Tensor) -> Tensor:
        """Normalises x so that the product of two results is the logit of softmax attention."""
        scale: float = self.head_dim**-0.25
        return F.rms_norm(x, (self.head_dim,), eps=self.eps) * scale

    def _phi(self, x: Tensor) -> Tensor:
        exponent = torch.einsum("bthk,hfk->bthf", x, self.features.to(x.dtype)) - 0.5 * x.square().sum(-1, keepdim=True)
        scale: float = self.size**-0.5
        return exponent.exp() * scale


def _count(positions: Tensor) -> Tensor:
    """[B] -> [B,1,1,1]: tokens that the means are over."""
    return positions.clamp(min=1)[:, None, None, None]
