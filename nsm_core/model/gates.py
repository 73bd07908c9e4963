"""Gates that read the state they change: GRU, LSTM and the literature's free gate (benchmarks/notes/layers.md).

One update of every slot, from the tokens routed to it since the last one. They are non-linear in the state, so that
updates follow each other; the linear gate (`pulse.py`) has a parallel form instead.
"""

from __future__ import annotations

import abc

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsm_core.config import ModelConfig


class Gate(nn.Module, abc.ABC):
    """New slots from old ones. All tensors [..., H, M, K] fp32 except `coverage` [..., H, M, 1] in [0, 1].

    `coverage` is the share of a slot that may change: a slot that nothing was routed to stays as it is.
    """

    num_parts: int  # projections of input and state
    has_cell = False

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        heads, head_dim, self.eps = config.num_heads, config.head_dim, config.norm_eps
        self.from_input = nn.Parameter(torch.randn(heads, head_dim, self.num_parts * head_dim) * head_dim**-0.5)
        self.from_state = nn.Parameter(torch.randn(heads, head_dim, self.num_parts * head_dim) * head_dim**-0.5)
        self.bias = nn.Parameter(torch.zeros(heads, 1, self.num_parts * head_dim))

    def parts(self, update: Tensor, slots: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Projections of the update with the bias, and those of the normed state, each [..., H, M, K]."""
        normed = F.rms_norm(slots, (slots.shape[-1],), eps=self.eps)
        inputs = update @ self.from_input + self.bias
        return list(inputs.chunk(self.num_parts, dim=-1)), list(
            (normed @ self.from_state).chunk(self.num_parts, dim=-1)
        )

    @abc.abstractmethod
    def forward(self, update: Tensor, coverage: Tensor, slots: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        """The new slots and the new cell; gates without a cell hand it through."""


class GruGate(Gate):
    """z, r = sigmoid(W u + U S); c = tanh(W u + r * U S); S moves the fraction coverage * z of the way to c."""

    num_parts = 3

    def forward(self, update: Tensor, coverage: Tensor, slots: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        (open_u, reset_u, new_u), (open_s, reset_s, new_s) = self.parts(update, slots)
        candidate = torch.tanh(new_u + torch.sigmoid(reset_u + reset_s) * new_s)
        return torch.lerp(slots, candidate, coverage * torch.sigmoid(open_u + open_s)), cell


class LstmGate(Gate):
    """Input, forget and output gates around a cell; the slots are the cell behind the output gate."""

    num_parts = 4
    has_cell = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        with torch.no_grad():
            self.bias.chunk(self.num_parts, dim=-1)[1].fill_(1.0)  # forget little at the start (Gers et al. 2000)

    def forward(self, update: Tensor, coverage: Tensor, slots: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        gates = [u + s for u, s in zip(*self.parts(update, slots), strict=True)]
        take, keep, show, candidate = gates
        updated = torch.sigmoid(keep) * cell + torch.sigmoid(take) * torch.tanh(candidate)
        cell = torch.lerp(cell, updated, coverage)
        return torch.lerp(slots, torch.sigmoid(show) * torch.tanh(cell), coverage), cell


class FreeGate(Gate):
    """S' = RMSNorm(f * S + i * c) with two independent gates: the literature's form, bounded by the norm alone."""

    num_parts = 3

    def forward(self, update: Tensor, coverage: Tensor, slots: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        take, keep, candidate = (u + s for u, s in zip(*self.parts(update, slots), strict=True))
        free = torch.sigmoid(keep) * slots + torch.sigmoid(take) * torch.tanh(candidate)
        return torch.lerp(slots, F.rms_norm(free, (free.shape[-1],), eps=self.eps), coverage), cell


GATES: dict[str, type[Gate]] = {"gru": GruGate, "lstm": LstmGate, "free": FreeGate}
