"""Several tokens of each row by one launch: rounds that leave the next round's rows and ids on the device.

A round is one CUDA graph: the step, the logits, the choice of tokens, and `end_round`. So the host launches a graph for
each round and reads all tokens of the launch at once.
"""

from __future__ import annotations

import functools
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from nsm_core.execution.base import Rounds
from nsm_core.execution.cuda.decode import NO_ROW
from nsm_core.execution.cuda.kernels.overlap import end_round
from nsm_core.execution.cuda.recording import record
from nsm_core.sampling.device import NUM_COLUMNS, PendingTokens, choose_on_device
from nsm_core.sampling.result import SKIPPED
from nsm_core.state.to_device import copy_to_device

# Rounds of a launch by the largest number of rows: one or two milliseconds, for which a new request waits twice at most
MOST_ROUNDS = {256: 4, 512: 2}


class Steps(Protocol):
    """Steps over buffers that keep their addresses."""

    @property
    def buckets(self) -> tuple[int, ...]: ...

    @property
    def largest_batch(self) -> int: ...

    def bucket(self, num_rows: int) -> int:
        """The size of the recorded step for so many rows."""
        ...

    def inputs_of(self, bucket: int) -> Tensor:
        """[2, bucket or one more] int64: rows of the pool, NO_ROW for padding, and ids."""
        ...

    def run(self, bucket: int) -> Tensor:
        """Launches a step over its inputs, and the logits: [bucket, V] fp32."""
        ...


class RecordedRounds:
    """The rounds of an executor."""

    def __init__(self, steps: Steps, pauses: Tensor, device: torch.device, *, graphs: bool) -> None:
        """`pauses` uint8 [rows of the pool, V]: the pausing ids of each row. `graphs`: see CudaOptions."""
        self._steps, self._pauses, self._device = steps, pauses, device
        self._graphs: dict[int, torch.cuda.CUDAGraph] | None = {} if graphs else None
        self._memory = torch.cuda.graph_pool_handle() if graphs else None
        most = _even(steps.largest_batch)
        # for each row the tokens left, then for each the number of rounds so far, then the parameters of each
        self._words = torch.zeros(most * (NUM_COLUMNS + 2), dtype=torch.int64, device=device)
        self._rounds = torch.full((max(MOST_ROUNDS.values()), most), SKIPPED, dtype=torch.int64, device=device)
        self._last = torch.full((most,), SKIPPED, dtype=torch.int64, device=device)

    def most_rounds(self, num_rows: int) -> int:
        """Of a launch of so many rows; 0: they are too many for one."""
        if num_rows > self._steps.largest_batch:
            return 0
        return next((most for rows, most in MOST_ROUNDS.items() if num_rows <= rows), 0)

    def record_all(self) -> None:
        """Records a round of each size now, not at its first launch."""
        for bucket in self._steps.buckets:
            self._graph(bucket)

    @torch.inference_mode()
    def launch_all(self) -> None:
        """The kernels of a round that are not the executor's, on rows of padding."""
        bucket = self._steps.bucket(1)
        self._write(bucket, Rounds(np.zeros((1, NUM_COLUMNS), np.int64), np.ones(1, np.int64), 1))
        self._steps.inputs_of(bucket).fill_(NO_ROW)
        self._end(bucket, torch.zeros(bucket, dtype=torch.int64, device=self._device))

    def launch(self, num_rows: int, rounds: Rounds) -> PendingTokens:
        """`rounds` for the rows and ids that the inputs have."""
        bucket = self._steps.bucket(num_rows)
        graph = self._graph(bucket)
        self._write(bucket, rounds)
        for _ in range(rounds.number):
            if graph is None:
                self._run(bucket)
            else:
                graph.replay()
        return PendingTokens(self._last[:num_rows], self._rounds[: rounds.number])

    def _graph(self, bucket: int) -> torch.cuda.CUDAGraph | None:
        """Recorded if it was not; no row is touched then, but the inputs are lost."""
        if self._graphs is None:
            return None
        if bucket not in self._graphs:
            inputs = self._steps.inputs_of(bucket)
            before = inputs.clone()
            inputs.fill_(NO_ROW)
            self._words.zero_()
            self._graphs[bucket] = record(functools.partial(self._run, bucket), self._device, memory=self._memory)
            inputs.copy_(before)
        return self._graphs[bucket]

    def _write(self, bucket: int, rounds: Rounds) -> None:
        """One copy. Rows of padding are greedy."""
        num_rows, size = len(rounds.limits), _even(bucket)
        words = np.zeros(size * (NUM_COLUMNS + 2), np.int64)
        words[:num_rows] = rounds.limits
        words[2 * size :][: num_rows * NUM_COLUMNS] = rounds.choices.reshape(-1)
        copy_to_device(words, self._words[: len(words)])

    @torch.inference_mode()
    def _run(self, bucket: int) -> None:
        logits = self._steps.run(bucket)
        self._end(bucket, choose_on_device(logits, self._params(bucket)))

    def _params(self, bucket: int) -> Tensor:
        """[bucket, NUM_COLUMNS]."""
        return self._words[2 * _even(bucket) :][: bucket * NUM_COLUMNS].view(bucket, NUM_COLUMNS)

    def _end(self, bucket: int, chosen: Tensor) -> None:
        inputs, size = self._steps.inputs_of(bucket), _even(bucket)
        with torch.cuda.device_of(inputs):  # type: ignore[no-untyped-call]
            end_round(
                rows=inputs[0, :bucket],
                ids=inputs[1, :bucket],
                chosen=chosen,
                params=self._params(bucket),
                left=self._words[:bucket],
                number=self._words[size : size + bucket],
                rounds=self._rounds,
                last=self._last,
                pauses=self._pauses,
                no_row=NO_ROW,
                skipped=SKIPPED,
            )


def _even(number: int) -> int:
    """So that all addresses are multiples of 16 bytes: others make other programs."""
    return number + number % 2
