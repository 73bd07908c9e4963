"""Several tokens of several rows by one call of the native kernels: see `DecodeRounds`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from nsm_core.execution.base import DecodeInputs
from nsm_core.execution.native.library import Slice


class NativeDecoder:
    """Of one runner. `width`: of a hidden vector."""

    def __init__(self, library: ctypes.CDLL, runner: int, *, width: int, vocab_size: int) -> None:
        self._library, self._runner = library, runner
        self._width, self._vocab_size = width, vocab_size
        self._scratch = torch.empty(0)  # hidden vectors, then logits; as long as most rows needed so far

    def __call__(self, rows: Sequence[int], inputs: DecodeInputs, /) -> npt.NDArray[np.int64]:
        """Raises IndexError for an id that the vocabulary does not have, MemoryError."""
        num_rows = len(rows)
        if len(self._scratch) < num_rows * (self._width + self._vocab_size):
            self._scratch = torch.empty(num_rows * (self._width + self._vocab_size))
        # named, so that they live as long as the call
        row_array, ids, choices = np.array(rows, np.int32), inputs.ids.copy(), inputs.choices.copy()
        end_ids = np.array([token_id for ids in inputs.end_ids for token_id in ids], np.int32)
        num_end_ids = np.array([len(ids) for ids in inputs.end_ids], np.int32)
        tokens = np.empty((inputs.most_rounds, num_rows), np.int64)
        addresses = [array.ctypes.data for array in (row_array, ids, choices, end_ids, num_end_ids)]
        hidden = self._scratch.data_ptr()
        logits = hidden + num_rows * self._width * self._scratch.element_size()
        wanted = Slice(
            *addresses,
            *(num_rows, inputs.most_rounds, inputs.seconds),
            *(inputs.interrupt.ctypes.data, hidden, logits, tokens.ctypes.data),
        )
        num_rounds = self._library.nsm_decode(self._runner, ctypes.byref(wanted))
        if num_rounds == 0:
            raise IndexError(
                f"token ids must be below {self._vocab_size}, got {inputs.ids.min()} to {inputs.ids.max()}"
            )
        if num_rounds < 0:
            raise MemoryError("no memory to draw tokens")
        return tokens[:num_rounds]
