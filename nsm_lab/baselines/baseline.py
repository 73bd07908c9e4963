"""The base of the baseline layers: the seam of our own layers, zero initial states, one form for all calls."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nsm_core.model.mixer import Mixer
from nsm_core.model.segments import Segments
from nsm_core.ops.short_conv.reference import convolve, next_tail
from nsm_core.state.spec import State


class Baseline(Mixer):
    """A layer to compare with: plain PyTorch after the paper's equations, the recurrence in the state's precision.

    A decode step is a text of one token. `out` is the last matrix, zero at the start like that of our layers.
    """

    out: nn.Linear

    def initial_state(self, batch_size: int) -> State:
        device = self.out.weight.device
        return {name: torch.zeros(batch_size, *shape, device=device) for name, shape in self.state_shapes().items()}

    def step(self, x: Tensor, state: State, positions: Tensor) -> tuple[Tensor, State]:
        out, new_state = self.forward(x[:, None], state, Segments(positions[:, None]))
        return out[:, 0], new_state


def linear(d_in: int, d_out: int) -> nn.Linear:
    """A matrix without a bias, started like ours."""
    made = nn.Linear(d_in, d_out, bias=False)
    nn.init.normal_(made.weight, std=d_in**-0.5)
    return made


def zero_linear(d_in: int, d_out: int) -> nn.Linear:
    """The last matrix of a layer, which says nothing at the start."""
    made = nn.Linear(d_in, d_out, bias=False)
    nn.init.zeros_(made.weight)
    return made


def causal_conv(x: Tensor, weight: Tensor, tail: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """x [B,T,D], weight [taps,D], tail [B,taps-1,D] -> a filter for each channel [B,T,D], and the new tail."""
    joined = torch.cat((tail, x.to(tail.dtype)), dim=1)
    mixed = convolve(joined, weight.to(tail.dtype), segments.reset)
    return mixed, next_tail(joined, tail.shape[1], segments.lengths)


def silenced(valid: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors [B,T,...] with zeros at padding."""
    if valid is None:
        return tensors
    return tuple(torch.where(valid.view(*valid.shape, *[1] * (x.dim() - 2)), x, 0.0) for x in tensors)
