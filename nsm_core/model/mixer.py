"""The seam between a block and the layer that mixes information along the sequence."""

from __future__ import annotations

import abc

from torch import Tensor, nn

from nsm_core.model.segments import Segments
from nsm_core.state.spec import State


class Mixer(nn.Module, abc.ABC):
    """A layer with a fixed-size state. Functional: it never modifies a given state.

    `forward` over any split of a text and `step` token by token agree within the tolerances of
    benchmarks/notes/model.md.
    """

    @abc.abstractmethod
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the fp32 tensors that the layer carries, without the batch dimension."""

    @abc.abstractmethod
    def initial_state(self, batch_size: int) -> State:
        """The start of a text: the tensors of `state_shapes`, [batch_size, *shape] fp32."""

    @abc.abstractmethod
    def forward(self, x: Tensor, state: State, segments: Segments) -> tuple[Tensor, State]:
        """x [B,T,d] on top of `state`; returns y [B,T,d] and the state after each row's end."""

    @abc.abstractmethod
    def step(self, x: Tensor, state: State, positions: Tensor) -> tuple[Tensor, State]:
        """One token a row: x [B,d], positions [B] -> y [B,d] and the new state."""


def init_projections(*inputs: nn.Linear, out: nn.Linear) -> None:
    """Initialises a layer: projections preserve the variance, and `out` adds zero to the residual."""
    for matrix in inputs:
        nn.init.normal_(matrix.weight, std=matrix.in_features**-0.5)
    nn.init.zeros_(out.weight)
