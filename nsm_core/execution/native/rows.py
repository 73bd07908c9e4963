"""What the native executors of all architectures share: rows of a pool that advance in place, in the calling thread."""

from __future__ import annotations

import ctypes
import itertools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nsm_core.execution.base import Overlap, PrepareMore
from nsm_core.execution.native.draw import draw_tokens
from nsm_core.execution.native.masks import mask_tokens
from nsm_core.execution.native.savepoint import NativeSavepoint
from nsm_core.state.pool import StatePool
from nsm_core.state.spec import State, StateSpec

# Tokens that pass the layers together: weights are read once for all of them, activations stay in the cache.
PIECE_TOKENS = 64

Ints = npt.NDArray[np.int32]


class NativeRows(ABC):
    """Rows advance in place, in the pool (see Executor).

    Equal requests give equal bits, whatever else is in their batch and however their prompts are cut. Calls release the
    interpreter's lock.
    """

    draw = staticmethod(draw_tokens)
    mask = staticmethod(mask_tokens)
    prompt_unit = 1  # every cut of a prompt gives the same bits
    reads_ragged = True  # pieces are filled with the tokens of whatever rows come
    overlap: Overlap | None = None  # the CPU computes in the calling thread
    prepare_more: PrepareMore | None = None

    def __init__(
        self,
        spec: StateSpec,
        initial: State,
        *,
        num_rows: int,
        poison: bool,
        num_ids: int,
        held_as: Mapping[str, torch.dtype] = MappingProxyType({}),
    ) -> None:
        self.initial = initial
        self.pool = StatePool(spec, num_rows, poison=poison, held_as=held_as)
        self._num_ids = num_ids

    def _own_runner(self, library: ctypes.CDLL, runner: int | None, free: Callable[[int], object]) -> int:
        """The runner, freed with this object; all rows but the first lie on huge pages (see `Pages`).

        Raises MemoryError if there is none.
        """
        if runner is None:
            raise MemoryError("no memory for the native executor's work space")
        for tensor in self.pool.tensors.values():
            others = tensor[1:]
            library.nsm_prefer_huge_pages(others.data_ptr(), others.nbytes)
        # Not at the interpreter's end: an engine's thread may be in a call then
        weakref.finalize(self, free, runner).atexit = False
        return runner

    @torch.inference_mode()
    def step(self, rows: Sequence[int], ids: Sequence[int]) -> Tensor:
        self.pool.check_leased(rows)
        return self._run(as_ints(rows), np.ones(len(rows), np.int32), ids)

    @torch.inference_mode()
    def read(self, rows: Sequence[int], ids: Sequence[Sequence[int]]) -> list[Tensor]:
        self.pool.check_leased(rows)
        counts = [len(row) for row in ids]
        flat = list(itertools.chain.from_iterable(ids))
        return list(torch.split(self._run(as_ints(rows), as_ints(counts), flat), counts))

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        hidden = hidden.contiguous()
        out = torch.empty(len(hidden), self._num_ids)
        self._multiply_head(hidden, out)
        return out

    @torch.inference_mode()
    def savepoint(self, row: int, num_tokens: int, /) -> NativeSavepoint:
        return NativeSavepoint(self.pool, row, num_tokens)

    @abstractmethod
    def _run(self, rows: Ints, counts: Ints, ids: Sequence[int]) -> Tensor:
        """Row rows[i] reads counts[i] of the ids: hidden [len(ids), d].

        Raises IndexError for an id that the model does not have, when nothing is read, and MemoryError.
        """

    @abstractmethod
    def _multiply_head(self, hidden: Tensor, out: Tensor) -> None:
        """hidden [n, d] contiguous -> logits, into out [n, V]. Raises MemoryError."""


def require_memory(done: int) -> None:
    """Raises MemoryError for the answer of a kernel that found none: 0 or less."""
    if done <= 0:
        raise MemoryError("no memory for a step of the native kernels")


def as_ints(values: Sequence[int]) -> Ints:
    """For the kernels."""
    return np.array(values, np.int32)
