"""Pairs of overlapped and waiting engines, and executors that record their calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from nsm_core.engine.request import GenerationRequest
from nsm_core.execution.base import ExecutorFactory, SequenceModel
from nsm_core.execution.eager import EagerExecutor
from nsm_core.tokenizer import Tokenizer
from tests.nsm_core.engine.harness import (
    FakeOverlap,
    Outcome,
    make_engine,
    overlapped,
    run_all,
)


class Pair:
    """Engines for one model: `plain`, and three whose steps overlap. Requests of `tagged` and `in_rounds` have tags;
    `in_rounds` launches three tokens at a time.
    """

    def __init__(
        self, model: SequenceModel, tokenizer: Tokenizer, executor: ExecutorFactory = EagerExecutor, **limits: Any
    ) -> None:
        self.model = model
        self.made: list[Any] = []

        def make(model: SequenceModel, *, num_rows: int, poison: bool) -> Any:
            self.made.append(overlapped(executor)(model, num_rows=num_rows, poison=poison))
            return self.made[-1]

        self.plain = make_engine(model, tokenizer, executor=executor, speculation="off", **limits)
        self.overlapped = make_engine(model, tokenizer, executor=make, speculation="off", **limits)
        self.tagged = make_engine(model, tokenizer, executor=overlapped(executor), speculation="off", **limits)
        factory = overlapped(executor, num_rounds=3)
        self.in_rounds = make_engine(model, tokenizer, executor=factory, speculation="off", **limits)
        self._tokenizer = tokenizer

    @property
    def fake(self) -> FakeOverlap:
        fake = self.made[0].overlap
        assert isinstance(fake, FakeOverlap)
        return fake

    def compare(
        self, requests: Sequence[GenerationRequest], *, arrivals: Sequence[int] = (), is_tagged: bool = True
    ) -> dict[str, Outcome]:
        """`is_tagged`: with the engines whose requests have tags too."""
        want = run_all(self.plain, requests, arrivals=arrivals)
        assert run_all(self.overlapped, requests, arrivals=arrivals) == want
        if is_tagged:
            for engine in (self.tagged, self.in_rounds):
                assert run_all(engine, requests, arrivals=arrivals, reads_ids=self._tokenizer) == want
        assert self.overlapped.stats().num_running == self.overlapped.stats().num_waiting == 0
        return want


class RecordingExecutor(EagerExecutor):
    """Records its calls, and the waits for its tokens."""

    notes: list[str]

    def step(self, rows: Sequence[int], ids: Sequence[int]) -> Tensor:
        self.notes.append(f"step {len(rows)}")
        return super().step(rows, ids)

    def read(self, rows: Sequence[int], ids: Sequence[Sequence[int]]) -> list[Tensor]:
        self.notes.append(f"read {len(rows)}")
        return super().read(rows, ids)
