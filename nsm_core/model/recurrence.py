"""A gated linear recurrence as a layer: minGRU (Feng et al. 2024) with an output gate."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsm_core.config import ModelConfig
from nsm_core.model.mixer import Mixer, init_projections
from nsm_core.model.segments import Segments, first_tokens, valid_tokens
from nsm_core.ops.linear_scan import linear_scan
from nsm_core.state.spec import State

# At the start a channel keeps between a half and all but a thousandth of itself at a token.
OPEN_RANGE = (0.001, 0.5)


class LinearRecurrence(Mixer):
    """h[t] = (1 - z) * h[t-1] + z * c with z and c from the token alone; y = W_o(h * SiLU(g)). The state is h [d]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d = config.d_model
        self.project = nn.Linear(d, 3 * d, bias=False)  # candidate c, how far to move z, output gate g
        low, high = (math.log(bound) for bound in OPEN_RANGE)
        self.open_bias = nn.Parameter(torch.logit(torch.linspace(low, high, d).exp()))
        self.out = nn.Linear(d, d, bias=False)
        init_projections(self.project, out=self.out)

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"hidden": (self.out.weight.shape[0],)}

    def initial_state(self, batch_size: int) -> State:
        return {"hidden": torch.zeros(batch_size, *self.state_shapes()["hidden"], device=self.out.weight.device)}

    def forward(self, x: Tensor, state: State, segments: Segments) -> tuple[Tensor, State]:
        candidate, opening, gate = self.project(x).chunk(3, dim=-1)
        hidden = state["hidden"]
        move = torch.sigmoid(opening.to(hidden.dtype) + self.open_bias)
        valid = valid_tokens(x.shape[1], segments)
        if valid is not None:  # padding moves nothing
            move = torch.where(valid[..., None], move, 0.0)
        decay = 1.0 - move
        if segments.reset is not None:
            decay = torch.where(first_tokens(segments.reset)[..., None], 0.0, decay)
        scanned = linear_scan(decay, move * candidate.to(hidden.dtype), hidden)
        out: Tensor = self.out(scanned.to(gate.dtype) * F.silu(gate))
        return out, {"hidden": scanned[:, -1]}

    def step(self, x: Tensor, state: State, positions: Tensor) -> tuple[Tensor, State]:
        candidate, opening, gate = self.project(x).chunk(3, dim=-1)
        hidden = state["hidden"]
        move = torch.sigmoid(opening.to(hidden.dtype) + self.open_bias)
        hidden = (1.0 - move) * hidden + move * candidate.to(hidden.dtype)
        out: Tensor = self.out(hidden.to(gate.dtype) * F.silu(gate))
        return out, {"hidden": hidden}
