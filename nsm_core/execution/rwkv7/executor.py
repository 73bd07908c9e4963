"""RWKV-7 on hand-written CPU kernels, in int8, int4 or fp32, states in place in the pool."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from nsm_core.execution.base import DecodeRounds
from nsm_core.execution.native.precision import Precision
from nsm_core.execution.native.rows import PIECE_TOKENS, Ints, NativeRows, require_memory
from nsm_core.execution.rwkv7.library import load_rwkv7_library
from nsm_core.execution.rwkv7.weights import Rwkv7Weights
from nsm_core.rwkv7.model import CHANNEL_SHIFT, MATRIX, TIME_SHIFT, Rwkv7Model
from nsm_core.state.spec import POSITION, State


def numerics(precision: Precision) -> str:
    """The class within which equal input gives equal bits, on any processor and at any batch, cut and thread count."""
    return f"cpu/{precision}/rwkv7-native-1"


class Rwkv7Executor(NativeRows):
    """`weights`: packed for the kernels."""

    decode_rounds: DecodeRounds | None = None

    def __init__(
        self,
        model: Rwkv7Model,
        *,
        num_rows: int,
        poison: bool = False,
        num_threads: int = 1,
        weights: Rwkv7Weights,
    ) -> None:
        self._weights = weights
        # Views of one zero: the start of a text takes no memory
        initial: State = {
            spec.name: torch.zeros((), dtype=spec.dtype).expand(1, *spec.shape) for spec in model.state_spec.tensors
        }
        super().__init__(model.state_spec, initial, num_rows=num_rows, poison=poison, num_ids=weights.num_ids)
        library = load_rwkv7_library()
        if library is None:
            raise ValueError("the native kernels were not built")
        self._library = library
        runner = self._new_runner(model.config.num_layers, num_threads)
        self._runner = self._own_runner(library, runner, library.nsm_rwkv7_runner_free)

    def _multiply_head(self, hidden: Tensor, out: Tensor) -> None:
        require_memory(self._library.nsm_rwkv7_logits(self._runner, hidden.data_ptr(), len(hidden), out.data_ptr()))

    def _run(self, rows: Ints, counts: Ints, ids: Sequence[int]) -> Tensor:
        embedded = F.embedding(torch.tensor(ids, dtype=torch.int64), self._weights.embedding).float()
        hidden = torch.empty_like(embedded)
        done = self._library.nsm_rwkv7_run(
            *(self._runner, rows.ctypes.data, counts.ctypes.data, len(rows)),
            *(embedded.data_ptr(), hidden.data_ptr()),
        )
        require_memory(done)
        return hidden

    def _new_runner(self, num_layers: int, num_threads: int) -> int | None:
        tensors = self.pool.tensors
        states = [
            tensors[f"layers.{i}.{name}"] for name in (TIME_SHIFT, CHANNEL_SHIFT, MATRIX) for i in range(num_layers)
        ]
        runner: int | None = self._library.nsm_rwkv7_runner_new(
            self._weights.handle,
            tensors[POSITION].data_ptr(),
            (ctypes.c_void_p * len(states))(*(tensor.data_ptr() for tensor in states)),
            (ctypes.c_int64 * len(states))(*(tensor.stride(0) for tensor in states)),
            *(num_threads, PIECE_TOKENS),
        )
        return runner
