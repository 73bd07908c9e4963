"""A model beside a model: the same weights, watched by somebody else."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from nsm_core.model.nsm import NsmModel

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def twin_of(model: NsmModel) -> NsmModel:
    """Modules of its own, so that who watches it sees nothing of what others do with `model`; all else is shared."""
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    for module in model.modules():
        shared |= {id(value): value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}
    return copy.deepcopy(model, shared)
