"""The eager model over the packed weights, for observers and probes after the fp32 weights were freed."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsm_core.execution.native.library import Part
from nsm_core.execution.native.weights import NativeWeights, packed_matrices
from nsm_core.model.keyed import KeyedMixer
from nsm_core.model.nsm import NsmModel
from nsm_core.model.pulse import PulseMixer

# Rows that are unpacked at a time: their memory is negligible beside the packed ones.
PIECE_ROWS = 256


class UnpackedMatrix(nn.Module):
    """A matrix [rows, cols] that is unpacked to fp32 for each use: replaces a Linear without bias or an Embedding."""

    def __init__(self, weights: NativeWeights, layer: int, part: Part, size: tuple[int, int]) -> None:
        super().__init__()
        self._weights, self._layer, self._part = weights, layer, part
        self._num_rows, self._num_cols = size

    @property
    def weight(self) -> Tensor:
        """[rows, cols] fp32, unpacked at each call."""
        return self.rows(torch.arange(self._num_rows))

    def rows(self, ids: Tensor) -> Tensor:
        """ids [...] int64 -> [..., cols]."""
        rows = self._weights.rows(self._layer, self._part, ids.flatten(), self._num_cols)
        return rows.view(*ids.shape, self._num_cols)

    def forward(self, given: Tensor) -> Tensor:
        """ids [...] -> their rows [..., cols], or x [..., cols] -> x times the matrix [..., rows]."""
        if self._part is Part.EMBEDDING:
            return self.rows(given)
        pieces = torch.split(torch.arange(self._num_rows), PIECE_ROWS)
        return torch.cat([F.linear(given, self.rows(piece)) for piece in pieces], dim=-1)


class HalfLinear(nn.Module):
    """A Linear whose matrix [rows, cols] is stored in fp16, as in the kernels' routers, and used in fp32."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("rounded", linear.weight.detach().half(), persistent=False)
        self.bias = linear.bias

    @property
    def weight(self) -> Tensor:
        """[rows, cols] fp32, unpacked at each call."""
        return self.get_buffer("rounded").float()

    def forward(self, x: Tensor) -> Tensor:
        """x [..., cols] -> [..., rows]."""
        return F.linear(x, self.weight, self.bias)


def unpacked_model(model: NsmModel, weights: NativeWeights) -> NsmModel:
    """A copy of `model` with the packed matrices of `weights` and routers in fp16; it shares everything else.

    It computes the same as `model`, up to the rounding of weights, but slower. For inference only.
    """
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}

    for name, (index, part, weight) in packed_matrices(model).items():
        num_rows, num_cols = weight.shape
        module = model.get_submodule(name.removesuffix(".weight"))
        memo[id(module)] = UnpackedMatrix(weights, index, part, (num_rows, num_cols))
    for block in model.layers:
        if isinstance(block.mixer, PulseMixer):
            logits = block.mixer.router.logits
            memo[id(logits)] = HalfLinear(logits)
        elif isinstance(block.mixer, KeyedMixer):
            memo[id(block.mixer.rates)] = HalfLinear(block.mixer.rates)
    return copy.deepcopy(model, memo)
