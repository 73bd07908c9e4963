"""Copies of single rows of batched states, by as few launches as there are dtypes: views are made once for each row."""

from __future__ import annotations

import torch
from torch import Tensor

from nsm_core.state.spec import State


class StateRows:
    """Rows of tensors [rows, *shape]."""

    def __init__(self, tensors: State) -> None:
        self.tensors = tensors
        self._views: dict[int, tuple[list[Tensor], ...]] = {}

    def views(self, row: int) -> tuple[list[Tensor], ...]:
        """Of the row's tensors [*shape], those of one dtype together."""
        found = self._views.get(row)
        if found is None:
            groups: dict[torch.dtype, list[Tensor]] = {}
            for tensor in self.tensors.values():
                groups.setdefault(tensor.dtype, []).append(tensor[row])
            found = self._views[row] = tuple(groups.values())
        return found

    def copy_from(self, row: int, source: StateRows, source_row: int) -> None:
        """The source's row, of the same names and dtypes, becomes this one. Does not wait."""
        for target, values in zip(self.views(row), source.views(source_row), strict=True):
            torch._foreach_copy_(target, values)
