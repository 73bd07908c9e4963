"""The executor for GPUs: decode steps as CUDA graphs of fused kernels, prompts by the model's own kernels."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from nsm_core.execution.base import DecodeRounds, TakeSavepoint
from nsm_core.execution.cuda.decode import NO_ROW, DecodeStep
from nsm_core.execution.cuda.kernels.linear import run_linear
from nsm_core.execution.cuda.options import CudaOptions
from nsm_core.execution.cuda.overlap import CudaOverlap
from nsm_core.execution.cuda.prompt_reader import PromptReader
from nsm_core.execution.cuda.prompts import PROMPT_UNIT, prompt_model
from nsm_core.execution.cuda.recording import record
from nsm_core.execution.cuda.weights import pack_weights
from nsm_core.model.nsm import NsmModel
from nsm_core.sampling.device import launch_samplers
from nsm_core.sampling.kernel import LARGEST_VOCABULARY
from nsm_core.sampling.masks import mask_reference
from nsm_core.sampling.sampler import draw_reference
from nsm_core.state.pool import StatePool
from nsm_core.state.row_copies import launch_copy
from nsm_core.state.spec import State
from nsm_core.state.to_device import to_device

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class CudaExecutor:
    """Rows advance in place, in the pool (see Executor). A token's bits do not depend on the rows beside it.

    A batch is padded to the next of BUCKETS. Without a GPU, `graphs` must be False, and the kernels' compiler must run
    in its interpreter.
    """

    def __init__(
        self, model: NsmModel, *, num_rows: int, poison: bool = False, options: CudaOptions | None = None
    ) -> None:
        self.options = options or CudaOptions()
        self._model = model
        self._device = model.embedding.weight.device
        with torch.inference_mode():
            self.initial: State = model.initial_state(1)
        self.weights = pack_weights(model, self.options.weights.dtype)
        held_as = self.weights.rings(self.options.weights.ring_dtype)
        self.pool = StatePool(model.state_spec, num_rows, self._device, poison=poison, held_as=held_as)
        largest = next((bucket for bucket in BUCKETS if bucket >= num_rows), BUCKETS[-1])
        prompts = prompt_model(model, self.options.weights.prompt_dtype)
        self._prompts = PromptReader(prompts, self.pool, self._device, graphs=self.options.graphs)
        self._step = DecodeStep(self.weights, model.config, self.pool.tensors, largest)
        self._buckets = tuple(bucket for bucket in BUCKETS if bucket <= largest)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._has_run_plain = False
        # larger vocabularies are sampled on the host
        is_drawn_here = model.config.vocab_size <= LARGEST_VOCABULARY
        self.overlap: CudaOverlap | None = (
            CudaOverlap(self, model.config.vocab_size, self._device, graphs=self.options.graphs)
            if is_drawn_here
            else None
        )

    draw = staticmethod(draw_reference)  # for the few rows that are not drawn on the device
    mask = staticmethod(mask_reference)  # for the same
    prompt_unit = PROMPT_UNIT
    reads_ragged = False
    decode_rounds: DecodeRounds | None = None  # one graph for each step
    savepoint: TakeSavepoint | None = None  # prompts and single tokens have kernels of their own

    def record_all(self) -> None:
        """Records every size now, not at its first batch."""
        self.record_steps()
        while self.prepare_more():
            pass

    def record_steps(self) -> None:
        """Records every size of a step; those of prompts are left to `prepare_more`, or to their first use."""
        if self.options.graphs:
            for bucket in self._buckets:
                self._graphs[bucket] = self._capture(bucket)
            self._prompts.record_next()  # for the first request
            self._launch_unrecorded()

    def prepare_more(self) -> bool:
        if not self.options.graphs:
            return False
        if not self._has_run_plain:
            self._run_plain()
            return True
        return self._prompts.record_next()

    @torch.inference_mode()
    def _run_plain(self) -> None:
        """A step of the model as it is written, which the sampling of its states runs now and then: the first one loads
        libraries, for which streams would wait 0.2 s.
        """
        self._has_run_plain = True
        self._model.step(torch.zeros(1, dtype=torch.int64, device=self._device), self.initial)

    @torch.inference_mode()
    def launch_all(self) -> None:
        """Every kernel of steps, prompts and sampling, as few times as that takes; no row is touched."""
        for bucket in self._buckets:
            self._step.inputs(bucket).fill_(NO_ROW)
            with torch.cuda.device_of(self._step.inputs(bucket)):  # type: ignore[no-untyped-call]
                self._step.run(bucket)
        self._prompts.launch_all()
        self._launch_unrecorded()

    @torch.inference_mode()
    def _launch_unrecorded(self) -> None:
        """Logits of steps and, in fp32, of prompts; the kernels of sampling, overlap and copies of states."""
        vocab_size, width = self._model.config.vocab_size, self._model.config.d_model
        for num_rows in {1, self._buckets[-1]}:
            for dtype in {self.weights.output.weight.dtype, torch.float32}:
                self.logits(torch.zeros(num_rows, width, dtype=dtype, device=self._device))
        if self.overlap is not None:
            self.overlap.launch()
            launch_samplers(vocab_size, self._device)
        launch_copy(self.pool.rows)

    @torch.inference_mode()
    def step(self, rows: Sequence[int], ids: Sequence[int]) -> Tensor:
        self.pool.check_leased(rows)
        most = self._buckets[-1]
        parts = [self._step_once(rows[at : at + most], ids[at : at + most]) for at in range(0, len(rows), most)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @torch.inference_mode()
    def read(self, rows: Sequence[int], ids: Sequence[Sequence[int]]) -> list[Tensor]:
        self.pool.check_leased(rows)
        return self._prompts.read(rows, ids)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        hidden = hidden.contiguous()
        logits = torch.empty(hidden.shape[0], self.weights.output.num_outputs, device=hidden.device)
        with torch.cuda.device_of(hidden):  # type: ignore[no-untyped-call]
            run_linear(self.weights.output, hidden, logits)
        return logits

    @property
    def buckets(self) -> tuple[int, ...]:
        """The sizes of recorded steps."""
        return self._buckets

    @property
    def largest_batch(self) -> int:
        """The most rows of one step."""
        return self._buckets[-1]

    def inputs(self, num_rows: int) -> Tensor:
        """[2, B] int64, B >= num_rows: rows of the pool, NO_ROW for padding, and ids, of the next step."""
        bucket = self.bucket(num_rows)
        if self.options.graphs and bucket not in self._graphs:
            self._graphs[bucket] = self._capture(bucket)  # writes to its inputs
        return self.inputs_of(bucket)

    def inputs_of(self, bucket: int) -> Tensor:
        """[2, bucket or one more]: `inputs`, whatever was recorded."""
        return self._step.inputs(bucket)

    @torch.inference_mode()
    def run(self, bucket: int) -> Tensor:
        """Launches a step over its inputs, kernel by kernel, and the logits: [bucket, V] fp32."""
        with torch.cuda.device_of(self._step.inputs(bucket)):  # type: ignore[no-untyped-call]
            self._step.run(bucket)
        return self.logits(self._step.buffers(bucket).hidden[:, : self._model.config.d_model])

    def replay(self, num_rows: int) -> Tensor:
        """Launches the step whose inputs were written: hidden [num_rows, d]."""
        bucket = self.bucket(num_rows)
        if self.options.graphs:
            self._graphs[bucket].replay()
        else:
            with torch.cuda.device_of(self._step.inputs(bucket)):  # type: ignore[no-untyped-call]
                self._step.run(bucket)
        return self._step.buffers(num_rows).hidden[:, : self._model.config.d_model].clone()

    def bucket(self, num_rows: int) -> int:
        """The size of the recorded step for so many rows."""
        return next(bucket for bucket in self._buckets if bucket >= num_rows)

    def _step_once(self, rows: Sequence[int], ids: Sequence[int]) -> Tensor:
        inputs = self.inputs(len(rows))
        padding = inputs.shape[1] - len(rows)
        inputs.copy_(self._tensor([[*rows, *[NO_ROW] * padding], [*ids, *[0] * padding]]))
        return self.replay(len(rows))

    @torch.inference_mode()
    def _capture(self, bucket: int) -> torch.cuda.CUDAGraph:
        """Records a step; no row is touched."""
        self._step.inputs(bucket).fill_(NO_ROW)
        return record(functools.partial(self._step.run, bucket), self._device)

    def _tensor(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return to_device(np.array(values, dtype=np.int64), self._device)
