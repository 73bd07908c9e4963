"""The native executor: hand-written CPU kernels, weights in int8 or int4, int8 activations, states in the pool."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nsm_core.execution.base import DecodeInputs
from nsm_core.execution.native.decode import NativeDecoder
from nsm_core.execution.native.library import require_library
from nsm_core.execution.native.precision import Precision
from nsm_core.execution.native.rows import PIECE_TOKENS, Ints, NativeRows, as_ints, require_memory
from nsm_core.execution.native.weights import NativeWeights
from nsm_core.model.nsm import NsmModel
from nsm_core.model.pulse import PulseMixer
from nsm_core.state.spec import POSITION, State, StateSpec


def numerics(precision: Precision, *, half_states: bool = False) -> str:
    """All processors and variants of the kernels give the same bits within this class.

    Products of whole numbers are summed exactly, and fp32 sums have one fixed order, which depends on the token's
    position in its text alone. So does the rounding of fp16 states, which follows each token.
    """
    return f"cpu/{precision}/native-1{'/fp16-states' if half_states else ''}"


class NativeExecutor(NativeRows):
    """`weights`: packed for the kernels; without them int8 ones are made.

    `half_states`: slots and windows of running sequences are fp16 in the pool, and rounded after each token.

    Raises ValueError for a model with a `native_unsupported_reason`.
    """

    def __init__(
        self,
        model: NsmModel,
        *,
        num_rows: int,
        poison: bool = False,
        num_threads: int = 1,
        weights: NativeWeights | None = None,
        half_states: bool = False,
    ) -> None:
        self._weights, self._half_states = weights or NativeWeights(model), half_states
        config = model.config
        spec, initial = model.state_spec, _initial_state(model)
        held_as = _halves(spec) if half_states else {}
        super().__init__(spec, initial, num_rows=num_rows, poison=poison, num_ids=config.vocab_size, held_as=held_as)
        self._width, self._library = config.d_model, require_library()
        runner = self._new_runner(config.num_layers, num_threads)
        self._runner = self._own_runner(self._library, runner, self._library.nsm_runner_free)
        self._decode = NativeDecoder(self._library, self._runner, width=self._width, vocab_size=config.vocab_size)

    def _multiply_head(self, hidden: Tensor, out: Tensor) -> None:
        require_memory(self._library.nsm_logits(self._runner, hidden.data_ptr(), len(hidden), out.data_ptr()))

    def decode_rounds(self, rows: Sequence[int], inputs: DecodeInputs, /) -> npt.NDArray[np.int64]:
        self.pool.check_leased(rows)
        return self._decode(rows, inputs)

    def _run(self, rows: Ints, counts: Ints, ids: Sequence[int]) -> Tensor:
        numbers, hidden = as_ints(ids), torch.empty(len(ids), self._width)
        done = self._library.nsm_run(
            *(self._runner, self._num_ids, rows.ctypes.data, counts.ctypes.data, len(rows)),
            *(numbers.ctypes.data, len(ids), hidden.data_ptr()),
        )
        if done == 0:
            raise IndexError(f"token ids must be below {self._num_ids}, got {min(ids)} to {max(ids)}")
        require_memory(done)
        return hidden

    def _new_runner(self, num_layers: int, num_threads: int) -> int | None:
        tensors = self.pool.tensors
        memory = [tensors.get(f"layers.{i}.slots", tensors.get(f"layers.{i}.kv")) for i in range(num_layers)]
        tails = [tensors.get(f"layers.{i}.conv_tail") for i in range(num_layers)]
        runner: int | None = self._library.nsm_runner_new(
            self._weights.handle,
            tensors[POSITION].data_ptr(),
            *(*_addresses(memory, in_bytes=True), *_addresses(tails, in_bytes=False)),
            *(int(self._half_states), num_threads, PIECE_TOKENS),
        )
        return runner


def _initial_state(model: NsmModel) -> State:
    """`model.initial_state(1)` without extra memory: views of the learned slots in the model, and of one zero."""
    state = {spec.name: torch.zeros((), dtype=spec.dtype).expand(1, *spec.shape) for spec in model.state_spec.tensors}
    for index, block in enumerate(model.layers):
        if isinstance(block.mixer, PulseMixer):
            state[f"layers.{index}.slots"] = block.mixer.initial_slots.detach().float()[None]
    return state


def _halves(spec: StateSpec) -> dict[str, torch.dtype]:
    """What lies in fp16: slots, and keys and values of windows. Tails of convolutions are few numbers."""
    return {tensor.name: torch.float16 for tensor in spec.tensors if tensor.name.endswith((".slots", ".kv"))}


def _addresses(
    tensors: Sequence[Tensor | None], *, in_bytes: bool
) -> tuple[ctypes.Array[ctypes.c_void_p], ctypes.Array[ctypes.c_int64]]:
    """The address of row 0 of each tensor, and the stride to row 1, in numbers or in bytes."""
    starts = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    strides = [
        0 if tensor is None else tensor.stride(0) * (tensor.element_size() if in_bytes else 1) for tensor in tensors
    ]
    return (ctypes.c_void_p * len(starts))(*starts), (ctypes.c_int64 * len(strides))(*strides)
