"""A copy of a model that shares its weights, for hooks of its own."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from nsm_core.model.nsm import NsmModel

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def shared_copy(model: NsmModel) -> NsmModel:
    """New modules with the same tensors: hooks on the copy see no call of `model`, and the other way round."""
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    for module in model.modules():
        shared |= {id(value): value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}
    return copy.deepcopy(model, shared)
