"""A training on recall whose steps are recorded: models this small wait for their launches, not for the device.

A step is recorded once for each kind of batch, a task and a number of sequences, as a CUDA graph. It takes its
sequences, its learning rate and the place of its loss from the device, so that replays follow each other without the
host. On a CPU the same steps run as they are.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from nsm_lab.evaluation.mqar.report import Epoch, MqarReport
from nsm_lab.evaluation.mqar.train import Recall, lr_factor, mean_accuracy, rows_of

Work = Callable[[], object]
Kind = tuple[int, int]  # of a batch: the number of its task, and its sequences

BLOCK = 32  # replays between two marks
BLOCKS_AHEAD = 4  # that wait for the device, so that it has work while the host prepares another training


class Recorder:
    """A stream of one device and the memory of the graphs that are recorded on it. On a CPU it records nothing."""

    def __init__(self, device: str) -> None:
        self.stream: Any = None
        if torch.device(device).type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._memory = torch.cuda.graph_pool_handle()
            with torch.cuda.stream(self.stream):
                # as long as one graph is kept, the memory of the others is used again
                self._first = self._graph(lambda: torch.zeros(1, device=device))

    def follow(self) -> None:
        """Lets what this stream does next wait for all that the current stream was given."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))

    def record(self, work: Work) -> Work:
        """What does the launches of `work` again. Called with the stream as the current one; `work` ran before."""
        return work if self.stream is None else self._graph(work).replay

    def mark(self) -> torch.cuda.Event | None:
        """An event after what was launched so far; None on a CPU, where all of it is done."""
        if self.stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return event

    def _graph(self, work: Work) -> torch.cuda.CUDAGraph:
        # not `torch.cuda.graph`, which would wait for the other streams of the device
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
        try:
            work()
        finally:
            graph.capture_end()
        return graph


class RecordedRecall:
    """One training: `advance` until `is_done`, then `report`."""

    def __init__(self, recall: Recall, recorder: Recorder) -> None:
        self._recall, self._recorder = recall, recorder
        self._started, self._num_launched = time.monotonic(), 0
        self._waiting = deque[torch.cuda.Event]()
        config, device = recall.config, recall.device
        self._order = [position for epoch in range(config.epochs) for position in recall.order(epoch)]
        factors = [lr_factor(step / len(self._order), config.warmup) for step in range(len(self._order))]
        recorder.follow()  # the model may still be on its way to the device
        with torch.cuda.stream(recorder.stream):
            self._first = torch.tensor([first for _, first in self._order], device=device)
            self._rates = config.lr * torch.tensor(factors, device=device)
            self._losses = torch.zeros(len(self._order), device=device)
            self._step, self._rate = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros((), device=device)
            self._replays = self._recorded(sorted(set(map(self._kind, self._order))))

    @property
    def is_done(self) -> bool:
        """Whether every step was launched and has ended."""
        return self._num_launched == len(self._order) and not self._waiting

    @property
    def num_waiting(self) -> int:
        """Blocks of steps that wait for the device."""
        return len(self._waiting)

    def advance(self) -> None:
        """Launches steps until BLOCKS_AHEAD blocks of them wait for the device."""
        while self._waiting and self._waiting[0].query():  # type: ignore[no-untyped-call]
            self._waiting.popleft()
        while len(self._waiting) < BLOCKS_AHEAD and self._num_launched < len(self._order):
            self._launch(self._order[self._num_launched : self._num_launched + BLOCK])

    def wait(self) -> None:
        """Until the oldest block that waits for the device has ended."""
        if self._waiting:
            self._waiting[0].synchronize()

    def report(self) -> MqarReport:
        """Tests the trained model. The loss is the mean of the last pass."""
        recall = self._recall
        with torch.cuda.stream(self._recorder.stream):
            accuracies = recall.test()
            loss = float(self._losses[-recall.steps_per_epoch :].mean())
        elapsed_s = time.monotonic() - self._started
        return recall.report(accuracies, [Epoch(recall.config.epochs, loss, mean_accuracy(accuracies), elapsed_s)])

    def _kind(self, position: tuple[int, int]) -> Kind:
        task, first = position
        return task, min(self._recall.config.batch, len(self._recall.train_sets[task].ids) - first)

    def _launch(self, block: list[tuple[int, int]]) -> None:
        with torch.cuda.stream(self._recorder.stream):
            for position in block:
                self._replays[self._kind(position)]()
        self._num_launched += len(block)
        mark = self._recorder.mark()
        if mark is not None:
            self._waiting.append(mark)

    @torch.enable_grad()
    def _recorded(self, kinds: list[Kind]) -> dict[Kind, Work]:
        """Each kind's step runs once before it is recorded; then model and optimiser are as they were."""
        model, optimizer = self._recall.model, self._recall.optimizer
        for group in optimizer.param_groups:
            group["lr"] = self._rate
        model.train()
        changed = (*model.parameters(), *model.buffers(), self._first, self._losses, self._step)
        before = [tensor.detach().clone() for tensor in changed]
        self._first.zero_()  # rows that every task has
        work = {kind: functools.partial(self._update, *kind) for kind in kinds}
        for update in work.values():
            update()
        with torch.no_grad():
            for tensor, value in zip(changed, before, strict=True):
                tensor.copy_(value)
        for state in optimizer.state.values():
            for value in state.values():
                value.zero_()
        for group in optimizer.param_groups:
            group["capturable"] = self._rate.is_cuda
        return {kind: self._recorder.record(update) for kind, update in work.items()}

    def _update(self, task: int, num_rows: int) -> None:
        """The step that `_step` says, of a batch of this kind."""
        first, rate = self._first[self._step], self._rates[self._step]  # [1]
        self._rate.copy_(rate[0])
        rows = first + torch.arange(num_rows, device=first.device)
        loss = self._recall.update(rows_of(self._recall.train_sets[task], rows))
        self._losses.index_copy_(0, self._step, loss[None])
        self._step += 1
