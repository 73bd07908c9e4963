"""A residual block: a mixer along the sequence, then a feed-forward layer."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from nsm_core.config import ModelConfig
from nsm_core.model.mixer import Mixer, init_projections
from nsm_core.model.segments import Segments
from nsm_core.state.spec import State


class SwiGlu(nn.Module):
    """Gated feed-forward."""

    def __init__(self, d_model: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, d_model, bias=False)
        init_projections(self.up, out=self.down)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        out: Tensor = self.down(F.silu(gate) * value)
        return out


class Block(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, mixer: Mixer) -> None:
        super().__init__()
        self.mixer_norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.mixer = mixer
        self.mlp_norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.mlp = SwiGlu(config.d_model, config.mlp_hidden)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor, state: State, segments: Segments) -> tuple[Tensor, State]:
        mixed, state = self.mixer(self.mixer_norm(x), state, segments)
        x = x + self.dropout(mixed)
        return x + self.dropout(self.mlp(self.mlp_norm(x))), state

    def step(self, x: Tensor, state: State, positions: Tensor) -> tuple[Tensor, State]:
        mixed, state = self.mixer.step(self.mixer_norm(x), state, positions)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), state
