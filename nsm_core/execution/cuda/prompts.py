"""The model for prompts on a GPU: its own operations, with products and attention that sum in a fixed order.

The vendor's library chooses the order of a sum by the shapes, so by the rest of the batch. Here a token's bits depend
on its own text alone, if prompts are cut at multiples of PROMPT_UNIT tokens (and windows are such multiples).
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from nsm_core.execution.cuda.kernels.linear import Linear, run_linear
from nsm_core.execution.cuda.kernels.prompt_attention import KEYS
from nsm_core.execution.cuda.prompt_blocks import prompt_block
from nsm_core.execution.cuda.weights import pack_matrix
from nsm_core.model.keyed import KeyedMixer
from nsm_core.model.nsm import NsmModel
from nsm_core.model.router import Router
from nsm_core.ops.slot_scan.chunked import CHUNK_LEN

PROMPT_UNIT = max(CHUNK_LEN, KEYS)


class TiledLinear(nn.Module):
    """An nn.Linear by the kernel of decode steps: a row's outputs depend neither on other rows nor on their number."""

    def __init__(self, layer: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        bias: Tensor | None = layer.bias
        packed = pack_matrix(layer.weight.detach().float(), dtype)
        self._packed = Linear(packed, layer.in_features, bias=None if bias is None else bias.detach().float())

    def forward(self, x: Tensor) -> Tensor:
        """x [..., inputs] -> [..., outputs] in the dtype of the products."""
        flat = x.reshape(-1, x.shape[-1]).to(self._packed.weight.dtype)
        out = flat.new_empty(flat.shape[0], self._packed.num_outputs)
        with torch.cuda.device_of(flat):  # type: ignore[no-untyped-call]
            run_linear(self._packed, flat, out)
        return out.view(*x.shape[:-1], -1)


def prompt_model(model: NsmModel, dtype: torch.dtype) -> NsmModel:
    """The same model for `read` and `forward`, its parameters shared. Large matrices are in `dtype`; routers and the
    rates of keyed slots are in fp32.
    """
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    own = copy.deepcopy(model, shared)
    for module in list(own.modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, nn.Linear):
                is_fine = isinstance(module, Router) or (isinstance(module, KeyedMixer) and name == "rates")
                setattr(module, name, TiledLinear(layer, torch.float32 if is_fine else dtype))
    own.blocks = nn.ModuleList(prompt_block(block, dtype) for block in own.layers)
    return own
