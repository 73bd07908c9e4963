"""RWKV-7 on a GPU: steps and prompts by the same kernels, recorded as CUDA graphs, states in place in the pool."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nsm_core.execution.base import DecodeRounds, Overlap
from nsm_core.execution.cuda.options import CudaOptions
from nsm_core.execution.cuda.recording import record
from nsm_core.execution.rwkv7.cuda.kernels.products import run_products
from nsm_core.execution.rwkv7.cuda.reading import NO_ROW, Pass
from nsm_core.execution.rwkv7.cuda.segments import FEW_PIECES, PassShape
from nsm_core.execution.rwkv7.cuda.weights import pack_cuda_rwkv7
from nsm_core.rwkv7.model import Rwkv7Model
from nsm_core.sampling.device import launch_samplers
from nsm_core.sampling.masks import mask_reference
from nsm_core.sampling.sampler import draw_reference
from nsm_core.state.pool import StatePool
from nsm_core.state.row_copies import launch_copy
from nsm_core.state.spec import State
from nsm_core.state.to_device import to_device

# Numbers of rows of a step, and of tokens of a part of prompts: a batch is padded to the next
STEP_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
READ_SIZES = (16, 32, 64, 128, 256, 512, 1024, 2048)
MOST_PIECES = 64  # texts in a part of prompts


class RowCopy:
    """A Savepoint: all of a row's state."""

    def __init__(self, pool: StatePool, row: int) -> None:
        pool.check_leased((row,))
        self._held = [(tensor[row], tensor[row].clone()) for tensor in pool.tensors.values()]

    def restore(self) -> None:
        for held, copy in self._held:
            held.copy_(copy)


class Rwkv7CudaExecutor:
    """Rows advance in place, in the pool (see Executor). A token's bits depend on its own text alone: neither on the
    rows beside it nor on how the text was cut.

    Steps and prompts share one set of buffers: calls must be on one stream. Without a GPU, `graphs` must be False, and
    the kernels' compiler must run in its interpreter.
    """

    draw = staticmethod(draw_reference)
    mask = staticmethod(mask_reference)
    prompt_unit = 1  # a head's matrix is moved token by token
    reads_ragged = True  # texts lie one after the other, without padding between them
    decode_rounds: DecodeRounds | None = None  # one graph for each step
    overlap: Overlap | None = None  # drafts and exact replay exclude it

    def __init__(
        self, model: Rwkv7Model, *, num_rows: int, poison: bool = False, options: CudaOptions | None = None
    ) -> None:
        self.options = options or CudaOptions()
        self._device, self._num_ids = model.device, model.num_ids
        self.weights = pack_cuda_rwkv7(model, self.options.weights.dtype)
        self.initial: State = model.initial_state(1)
        self.pool = StatePool(model.state_spec, num_rows, self._device, poison=poison)
        largest = next((size for size in STEP_SIZES if size >= num_rows), STEP_SIZES[-1])
        self._step_sizes = tuple(size for size in STEP_SIZES if size <= largest)
        with torch.inference_mode():
            self._pass = Pass(self.weights, model.config, self.pool.tensors, READ_SIZES[-1])
        self._graphs: dict[PassShape, torch.cuda.CUDAGraph] = {}

    def record_steps(self) -> None:
        """Records every size of a step; those of texts are left to `prepare_more`, or to their first use."""
        if self.options.graphs:
            for size in self._step_sizes:
                self._record(PassShape(size, size))

    def prepare_more(self) -> bool:
        left = [shape for shape in self._passes() if shape not in self._graphs] if self.options.graphs else []
        if left:
            self._record(left[0])
        return len(left) > 1

    @torch.inference_mode()
    def launch_all(self) -> None:
        """Every kernel of steps, texts and sampling; no row is touched."""
        for shape in self._passes():
            to = self._pass.given(shape).fill_(NO_ROW)
            with torch.cuda.device_of(to):  # type: ignore[no-untyped-call]
                self._pass.run(shape)
        for size in {1, self._step_sizes[-1]}:
            self.logits(self._pass.hidden(size))
        launch_samplers(self._num_ids, self._device)
        launch_copy(self.pool.rows)

    def _passes(self) -> Iterator[PassShape]:
        """Of steps, then of texts."""
        yield from (PassShape(size, size) for size in self._step_sizes)
        yield from (PassShape(size, most) for size in READ_SIZES for most in (FEW_PIECES, MOST_PIECES))

    @torch.inference_mode()
    def step(self, rows: Sequence[int], ids: Sequence[int]) -> Tensor:
        self.pool.check_leased(rows)
        most = self._step_sizes[-1]
        parts = [self._step_once(rows[at : at + most], ids[at : at + most]) for at in range(0, len(rows), most)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @torch.inference_mode()
    def read(self, rows: Sequence[int], ids: Sequence[Sequence[int]]) -> list[Tensor]:
        self.pool.check_leased(rows)
        hidden: list[list[Tensor]] = [[] for _ in rows]
        for part in cut_texts([len(row) for row in ids]):
            pieces = [(rows[index], ids[index][start:end]) for index, start, end in part]
            read = torch.split(self._read_part(pieces), [len(piece) for _, piece in pieces])
            for (index, _, _), each in zip(part, read, strict=True):
                hidden[index].append(each)
        return [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in hidden]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        x = hidden.to(self.weights.head.weight.dtype).contiguous()  # as the kernels made them: rounds nothing
        logits = torch.empty(len(x), self._num_ids, device=x.device)
        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
            run_products(self.weights.head, x, out=logits)
        return logits

    @torch.inference_mode()
    def savepoint(self, row: int, num_tokens: int, /) -> RowCopy:
        return RowCopy(self.pool, row)

    def _step_once(self, rows: Sequence[int], ids: Sequence[int]) -> Tensor:
        number = len(rows)
        size = self._size(number, self._step_sizes)
        given = np.zeros((6, size), np.int64)
        given[0], given[3] = NO_ROW, NO_ROW
        given[0, :number] = given[3, :number] = rows
        given[1, :number] = ids
        given[2], given[4], given[5] = 1, np.arange(size), 1
        return self._run(PassShape(size, size), given)[:number].to(torch.float32, copy=True)

    def _read_part(self, pieces: Sequence[tuple[int, Sequence[int]]]) -> Tensor:
        """Pieces of texts and their rows: hidden [tokens of all, D]."""
        rows, lengths = [row for row, _ in pieces], [len(ids) for _, ids in pieces]
        number = sum(lengths)
        shape = PassShape(self._size(number, READ_SIZES), self._size(len(pieces), (FEW_PIECES, MOST_PIECES)))
        given = np.zeros((6, shape.width), np.int64)
        given[0], given[3] = NO_ROW, NO_ROW
        given[0, :number] = np.repeat(rows, lengths)
        given[1, :number] = np.concatenate([np.asarray(ids, np.int64) for _, ids in pieces])
        for index, segment in enumerate(cut_texts(lengths, most_tokens=shape.segment_length)):
            counts = [end - start for _, start, end in segment]
            starts = np.cumsum([0, *counts])
            token, to = index * shape.segment_length, index * shape.num_pieces
            given[2, token : token + starts[-1]] = np.concatenate([_offsets(count) for count in counts])
            given[3, to : to + len(segment)] = [rows[piece] for piece, _, _ in segment]
            given[4, to : to + len(segment)] = starts[:-1]
            given[5, to : to + len(segment)] = counts
        return self._run(shape, given)[:number].to(torch.float32, copy=True)

    def _size(self, number: int, sizes: Sequence[int]) -> int:
        """The next recorded one; what is not recorded needs no padding."""
        return next(size for size in sizes if size >= number) if self.options.graphs else number

    def _run(self, shape: PassShape, given: npt.NDArray[np.int64]) -> Tensor:
        """hidden [tokens, D], in the buffer."""
        if self.options.graphs:
            graph = self._graphs.get(shape) or self._record(shape)
            self._pass.given(shape).copy_(to_device(given, self._device))
            graph.replay()
        else:
            to = self._pass.given(shape)
            to.copy_(to_device(given, self._device))
            with torch.cuda.device_of(to):  # type: ignore[no-untyped-call]
                self._pass.run(shape)
        return self._pass.hidden(shape.num_tokens)

    @torch.inference_mode()
    def _record(self, shape: PassShape) -> torch.cuda.CUDAGraph:
        """Records a pass; no row is touched."""
        self._pass.given(shape).fill_(NO_ROW)
        graph = record(functools.partial(self._pass.run, shape), self._device)
        self._graphs[shape] = graph
        return graph


def cut_texts(lengths: Sequence[int], most_tokens: int = READ_SIZES[-1]) -> list[list[tuple[int, int, int]]]:
    """Texts of these lengths in parts of at most `most_tokens` tokens and MOST_PIECES pieces: each piece is a text's
    number, the first of its tokens and the end. A text's pieces are in order, one in each part.
    """
    parts: list[list[tuple[int, int, int]]] = []
    room = 0
    for index, length in enumerate(lengths):
        start = 0
        while start < length:
            if room == 0 or len(parts[-1]) == MOST_PIECES:
                parts.append([])
                room = most_tokens
            end = min(length, start + room)
            parts[-1].append((index, start, end))
            room -= end - start
            start = end
    return parts


def _offsets(length: int) -> npt.NDArray[np.int64]:
    """See tokens.py."""
    offsets = 2 * np.arange(length, dtype=np.int64)
    offsets[-1] += 1
    return offsets
