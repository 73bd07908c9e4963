"""Copies of rows of batched states: on a GPU, any number of them by one launch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nsm_core.ops.dispatch import runs_kernels
from nsm_core.state.spec import State
from nsm_core.state.to_device import to_device


class StateRows:
    """Rows of tensors [rows, *shape], contiguous."""

    def __init__(self, tensors: State) -> None:
        self.tensors = tensors
        self._first = np.array([tensor.data_ptr() for tensor in tensors.values()], np.int64)
        self._stride = np.array([tensor[0].nbytes for tensor in tensors.values()], np.int64)

    def addresses(self, row: int) -> npt.NDArray[np.int64]:
        """Of the row of each tensor."""
        addresses: npt.NDArray[np.int64] = self._first + row * self._stride
        return addresses

    @functools.cached_property
    def parts(self) -> Tensor | None:
        """What a launch divides a row into, on the device: see `copy_words`. None: no kernel copies such rows."""
        tensor = next(iter(self.tensors.values()))
        if not runs_kernels(tensor):
            return None
        from nsm_core.state.row_kernel import WORD_BYTES, WORDS

        if (self._stride % WORD_BYTES).any():
            return None
        sizes = (self._stride // WORD_BYTES).tolist()
        parts = [(index, at, min(WORDS, size - at)) for index, size in enumerate(sizes) for at in range(0, size, WORDS)]
        return to_device(np.array(parts, np.int64), tensor.device)


@dataclasses.dataclass(frozen=True, slots=True)
class RowCopy:
    """Row `source_row` of `source` becomes row `row` of `target`, which has the same names, shapes and dtypes."""

    target: StateRows
    row: int
    source: StateRows
    source_row: int


@torch.inference_mode()
def copy_rows(copies: Sequence[RowCopy]) -> None:
    """Makes the copies, in no order: none of them writes what another reads or writes. Does not wait."""
    if not copies:
        return
    parts = copies[0].target.parts
    if parts is None:
        for copy in copies:
            for name, tensor in copy.target.tensors.items():
                tensor[copy.row].copy_(copy.source.tensors[name][copy.source_row])
        return
    from nsm_core.state.row_kernel import copy_words

    addresses = [(copy.source.addresses(copy.source_row), copy.target.addresses(copy.row)) for copy in copies]
    copy_words(to_device(np.array(addresses), parts.device), parts)


def launch_copy(rows: StateRows) -> None:
    """The kernel of `copy_rows`, if there is one: the first row becomes itself."""
    if rows.parts is not None:
        copy_rows([RowCopy(rows, 0, rows, 0)])
