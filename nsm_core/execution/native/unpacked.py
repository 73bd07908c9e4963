"""The model as it is written, over the packed weights: for whoever looks at a model whose fp32 weights are gone."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsm_core.execution.native.library import Part
from nsm_core.execution.native.weights import NativeWeights
from nsm_core.model.nsm import NsmModel
from nsm_core.model.pulse import PulseMixer

# Rows that are made at a time: the memory they take does not show beside the packed ones.
PIECE_ROWS = 256


class UnpackedMatrix(nn.Module):
    """A matrix [rows, cols] that exists in fp32 only while it is used: in place of a Linear without bias, or an
    Embedding.
    """

    def __init__(self, weights: NativeWeights, layer: int, part: Part, size: tuple[int, int]) -> None:
        super().__init__()
        self._weights, self._layer, self._part = weights, layer, part
        self._num_rows, self._num_cols = size

    @property
    def weight(self) -> Tensor:
        """[rows, cols] fp32, made for whoever asks."""
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
    """A Linear whose matrix [rows, cols] lies in fp16, as the kernels read routers, and is used in fp32."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("rounded", linear.weight.detach().half(), persistent=False)
        self.bias = linear.bias

    @property
    def weight(self) -> Tensor:
        """[rows, cols] fp32, made for whoever asks."""
        return self.get_buffer("rounded").float()

    def forward(self, x: Tensor) -> Tensor:
        """x [..., cols] -> [..., rows]."""
        return F.linear(x, self.weight, self.bias)


def unpacked(model: NsmModel, weights: NativeWeights) -> NsmModel:
    """A twin of `model` with the matrices of `weights` and routers in fp16, none in fp32; it shares everything else.

    It computes what `model` does, up to how weights are rounded, slower. For inference only.
    """
    kept: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}

    def replace(index: int, part: Part, module: nn.Module) -> None:
        num_rows, num_cols = module.get_parameter("weight").shape
        kept[id(module)] = UnpackedMatrix(weights, index, part, (num_rows, num_cols))

    replace(0, Part.EMBEDDING, model.embedding)
    for index, block in enumerate(model.layers):
        replace(index, Part.UP, block.mlp.up)
        replace(index, Part.DOWN, block.mlp.down)
        replace(index, Part.PROJECT, block.mixer.get_submodule("project"))
        replace(index, Part.OUT, block.mixer.get_submodule("out"))
        if isinstance(block.mixer, PulseMixer):
            logits = block.mixer.router.logits
            kept[id(logits)] = HalfLinear(logits)
    return copy.deepcopy(model, kept)
