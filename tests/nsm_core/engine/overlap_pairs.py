"""Engines that look ahead beside ones that wait, and executors that note what they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from nsm_core.engine.request import GenerationRequest
from nsm_core.execution.base import ExecutorFactory, SequenceModel
from nsm_core.execution.eager import EagerExecutor
from nsm_core.tokenizer import Tokenizer
from tests.nsm_core.engine.harness import (
    FakeLookAhead,
    Outcome,
    looking_ahead,
    make_engine,
    run_all,
)


class Pair:
    """Two engines for one model, one of which looks ahead."""

    def __init__(
        self, model: SequenceModel, tokenizer: Tokenizer, executor: ExecutorFactory = EagerExecutor, **limits: Any
    ) -> None:
        self.model = model
        self.made: list[Any] = []

        def make(model: SequenceModel, *, num_rows: int, poison: bool) -> Any:
            self.made.append(looking_ahead(executor)(model, num_rows=num_rows, poison=poison))
            return self.made[-1]

        self.plain = make_engine(model, tokenizer, executor=executor, speculation="off", **limits)
        self.ahead = make_engine(model, tokenizer, executor=make, speculation="off", **limits)

    @property
    def fake(self) -> FakeLookAhead:
        fake = self.made[0].look_ahead
        assert isinstance(fake, FakeLookAhead)
        return fake

    def compare(self, requests: Sequence[GenerationRequest], *, arrivals: Sequence[int] = ()) -> dict[str, Outcome]:
        want = run_all(self.plain, requests, arrivals=arrivals)
        assert run_all(self.ahead, requests, arrivals=arrivals) == want
        assert self.ahead.stats().num_running == self.ahead.stats().num_waiting == 0
        return want


class Noting(EagerExecutor):
    """Notes what is asked of it, and when its tokens are waited for."""

    notes: list[str]

    def step(self, rows: Sequence[int], ids: Sequence[int]) -> Tensor:
        self.notes.append(f"step {len(rows)}")
        return super().step(rows, ids)

    def read(self, rows: Sequence[int], ids: Sequence[Sequence[int]]) -> list[Tensor]:
        self.notes.append(f"read {len(rows)}")
        return super().read(rows, ids)
