"""RWKV-7 on hand-written CPU kernels, in int8 or fp32, states in place in the pool."""

from __future__ import annotations

import ctypes
import itertools
import weakref
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from nsm_core.execution.base import Overlap
from nsm_core.execution.native.draw import draw_tokens
from nsm_core.execution.native.masks import mask_tokens
from nsm_core.execution.native.savepoint import NativeSavepoint
from nsm_core.execution.rwkv7.library import load_rwkv7_library
from nsm_core.execution.rwkv7.weights import Rwkv7Precision, Rwkv7Weights
from nsm_core.rwkv7.model import CHANNEL_SHIFT, MATRIX, TIME_SHIFT, Rwkv7Model
from nsm_core.state.pool import StatePool
from nsm_core.state.spec import POSITION, State

# Tokens that pass the layers together: weights are read once for all of them, activations stay in the cache.
PIECE_TOKENS = 64

Ints = npt.NDArray[np.int32]


def numerics(precision: Rwkv7Precision) -> str:
    """The class within which equal input gives equal bits, on any processor and at any batch, cut and thread count."""
    return f"cpu/{precision}/rwkv7-native-1"


class Rwkv7Executor:
    """Rows advance in place, in the pool (see Executor).

    Equal requests give equal bits, whatever else is in their batch and however their prompts are cut. Calls release the
    interpreter's lock.
    """

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
        self.initial: State = {
            spec.name: torch.zeros((), dtype=spec.dtype).expand(1, *spec.shape) for spec in model.state_spec.tensors
        }
        self.pool = StatePool(model.state_spec, num_rows, poison=poison)
        library = load_rwkv7_library()
        if library is None:
            raise ValueError("the native kernels were not built")
        self._library = library
        for tensor in self.pool.tensors.values():
            library.nsm_prefer_huge_pages(tensor.data_ptr(), tensor.nbytes)
        self._runner = self._new_runner(model.config.num_layers, num_threads)
        # Not at the interpreter's end: an engine's thread may be in a call then
        weakref.finalize(self, library.nsm_rwkv7_runner_free, self._runner).atexit = False

    draw = staticmethod(draw_tokens)
    mask = staticmethod(mask_tokens)
    prompt_unit = 1  # every cut of a prompt gives the same bits
    reads_ragged = True  # pieces are filled with the tokens of whatever rows come
    overlap: Overlap | None = None  # the CPU computes in the calling thread

    @torch.inference_mode()
    def step(self, rows: Sequence[int], ids: Sequence[int]) -> Tensor:
        self.pool.check_leased(rows)
        return self._run(_ints(rows), np.ones(len(rows), np.int32), ids)

    @torch.inference_mode()
    def read(self, rows: Sequence[int], ids: Sequence[Sequence[int]]) -> list[Tensor]:
        self.pool.check_leased(rows)
        counts = [len(row) for row in ids]
        flat = list(itertools.chain.from_iterable(ids))
        return list(torch.split(self._run(_ints(rows), _ints(counts), flat), counts))

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        hidden = hidden.contiguous()
        out = torch.empty(len(hidden), self._weights.num_ids)
        self._library.nsm_rwkv7_logits(self._runner, hidden.data_ptr(), len(hidden), out.data_ptr())
        return out

    @torch.inference_mode()
    def savepoint(self, row: int, num_tokens: int, /) -> NativeSavepoint:
        return NativeSavepoint(self.pool, row, num_tokens)

    def _run(self, rows: Ints, counts: Ints, ids: Sequence[int]) -> Tensor:
        """Raises IndexError for an id that the model does not have; nothing is read then."""
        embedded = F.embedding(torch.tensor(ids, dtype=torch.int64), self._weights.embedding).float()
        hidden = torch.empty_like(embedded)
        self._library.nsm_rwkv7_run(
            *(self._runner, rows.ctypes.data, counts.ctypes.data, len(rows)),
            *(embedded.data_ptr(), hidden.data_ptr()),
        )
        return hidden

    def _new_runner(self, num_layers: int, num_threads: int) -> int:
        tensors = self.pool.tensors
        states = [
            tensors[f"layers.{i}.{name}"] for name in (TIME_SHIFT, CHANNEL_SHIFT, MATRIX) for i in range(num_layers)
        ]
        runner = self._library.nsm_rwkv7_runner_new(
            self._weights.handle,
            tensors[POSITION].data_ptr(),
            (ctypes.c_void_p * len(states))(*(tensor.data_ptr() for tensor in states)),
            (ctypes.c_int64 * len(states))(*(tensor.stride(0) for tensor in states)),
            *(num_threads, PIECE_TOKENS),
        )
        if runner is None:
            raise MemoryError("no memory for the native executor's work space")
        return int(runner)


def _ints(values: Sequence[int]) -> Ints:
    return np.array(values, np.int32)
