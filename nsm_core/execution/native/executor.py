"""The native executor: hand-written CPU kernels, int8 weights and activations, states in place in the pool."""

from __future__ import annotations

import ctypes
import itertools
import weakref
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nsm_core.execution.base import Overlap
from nsm_core.execution.native.draw import draw_tokens
from nsm_core.execution.native.library import load_library
from nsm_core.execution.native.masks import mask_tokens
from nsm_core.execution.native.savepoint import NativeSavepoint
from nsm_core.execution.native.weights import NativeWeights
from nsm_core.model.nsm import NsmModel
from nsm_core.model.pulse import PulseMixer
from nsm_core.state.pool import StatePool
from nsm_core.state.spec import POSITION, State

# All processors and variants of the kernels give the same bits: int8 products are summed exactly, and fp32 sums have
# one fixed order, which depends on the token's position in its text alone.
NUMERICS = "cpu/int8/native-1"
# Tokens that pass the layers together: weights are read once for all of them, activations stay in the cache.
PIECE_TOKENS = 64

Ints = npt.NDArray[np.int32]


class NativeExecutor:
    """Rows advance in place, in the pool (see Executor).

    Equal requests give equal bits, whatever else is in their batch and however their prompts are cut. Calls release the
    interpreter's lock. Raises ValueError for a model with a `native_unsupported_reason`.
    """

    def __init__(
        self,
        model: NsmModel,
        *,
        num_rows: int,
        poison: bool = False,
        num_threads: int = 1,
        weights: NativeWeights | None = None,
    ) -> None:
        self._weights = weights or NativeWeights(model)
        self.initial = _initial_state(model)
        self.pool = StatePool(model.state_spec, num_rows, poison=poison)
        self._width, self._vocab_size = model.config.d_model, model.config.vocab_size
        library = load_library()
        if library is None:
            raise ValueError("the native kernels were not built")
        self._library = library
        for tensor in self.pool.tensors.values():
            library.nsm_prefer_huge_pages(tensor.data_ptr(), tensor.nbytes)
        self._runner = self._new_runner(model.config.num_layers, num_threads)
        # Not at the interpreter's end: an engine's thread may be in a call then
        weakref.finalize(self, library.nsm_runner_free, self._runner).atexit = False

    draw = staticmethod(draw_tokens)
    mask = staticmethod(mask_tokens)
    prompt_unit = 1  # every cut of a prompt gives the same bits
    reads_ragged = True  # pieces are filled with the tokens of whatever rows come
    overlap: Overlap | None = None  # the CPU computes in the calling thread

    @torch.inference_mode()
    def step(self, rows: Sequence[int], ids: Sequence[int]) -> Tensor:
        self.pool.check_leased(rows)
        return self._run(_ints(rows), np.ones(len(rows), np.int32), _ints(ids))

    @torch.inference_mode()
    def read(self, rows: Sequence[int], ids: Sequence[Sequence[int]]) -> list[Tensor]:
        self.pool.check_leased(rows)
        counts = [len(row) for row in ids]
        flat = _ints(list(itertools.chain.from_iterable(ids)))
        return list(torch.split(self._run(_ints(rows), _ints(counts), flat), counts))

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        hidden = hidden.contiguous()
        out = torch.empty(len(hidden), self._vocab_size)
        self._library.nsm_logits(self._runner, hidden.data_ptr(), len(hidden), out.data_ptr())
        return out

    @torch.inference_mode()
    def savepoint(self, row: int, num_tokens: int, /) -> NativeSavepoint:
        return NativeSavepoint(self.pool, row, num_tokens)

    def _run(self, rows: Ints, counts: Ints, ids: Ints) -> Tensor:
        hidden = torch.empty(len(ids), self._width)
        is_known = self._library.nsm_run(
            *(self._runner, self._vocab_size, rows.ctypes.data, counts.ctypes.data, len(rows)),
            *(ids.ctypes.data, len(ids), hidden.data_ptr()),
        )
        if not is_known:
            raise IndexError(f"token ids must be below {self._vocab_size}, got {int(ids.min())} to {int(ids.max())}")
        return hidden

    def _new_runner(self, num_layers: int, num_threads: int) -> int:
        tensors = self.pool.tensors
        memory = [tensors.get(f"layers.{i}.slots", tensors.get(f"layers.{i}.kv")) for i in range(num_layers)]
        tails = [tensors.get(f"layers.{i}.conv_tail") for i in range(num_layers)]
        runner = self._library.nsm_runner_new(
            self._weights.handle,
            tensors[POSITION].data_ptr(),
            *(*_addresses(memory), *_addresses(tails)),
            *(num_threads, PIECE_TOKENS),
        )
        if runner is None:
            raise MemoryError("no memory for the native executor's work space")
        return int(runner)


def _initial_state(model: NsmModel) -> State:
    """`model.initial_state(1)` without extra memory: views of the learned slots in the model, and of one zero."""
    state = {spec.name: torch.zeros((), dtype=spec.dtype).expand(1, *spec.shape) for spec in model.state_spec.tensors}
    for index, block in enumerate(model.layers):
        if isinstance(block.mixer, PulseMixer):
            state[f"layers.{index}.slots"] = block.mixer.initial_slots.detach().float()[None]
    return state


def _addresses(tensors: Sequence[Tensor | None]) -> tuple[ctypes.Array[ctypes.c_void_p], ctypes.Array[ctypes.c_int64]]:
    """The address of row 0 of each tensor, and the stride to row 1 in numbers."""
    starts = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    strides = [0 if tensor is None else tensor.stride(0) for tensor in tensors]
    return (ctypes.c_void_p * len(starts))(*starts), (ctypes.c_int64 * len(strides))(*strides)


def _ints(values: Sequence[int]) -> Ints:
    return np.array(values, np.int32)
