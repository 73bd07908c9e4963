"""Python's part of a step: `python -m benchmarks.host_step`. A table, then one line of JSON.

The engine with an executor that computes nothing (its logits are of one array, made beforehand), by itself, and in its
thread with a reader of every request on the event loop; then, for executors that look ahead, with steps that are
launched and waited for later. CPU time; the best of several runs, since a busy neighbour only adds to it.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import time
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from benchmarks.measured_model import MEASURED_MODEL
from nsm_core.config import EngineConfig
from nsm_core.engine.async_engine import AsyncEngine
from nsm_core.engine.engine import Engine
from nsm_core.engine.request import GenerationRequest
from nsm_core.execution.base import NextInputs
from nsm_core.sampling.masks import mask_reference
from nsm_core.sampling.params import SamplingParams
from nsm_core.sampling.sampler import draw_reference
from nsm_core.state.pool import StatePool
from nsm_core.state.spec import POSITION, State, StateSpec, TensorSpec
from nsm_core.tokenizer import BpeTokenizer, Tokenizer
from nsm_lab.provenance import source_commit

SPEC = StateSpec((TensorSpec(POSITION, (), torch.int64),))


class NoModel:
    """As much of a model as an engine asks for; it gives every token the same few logits."""

    state_spec = SPEC

    def initial_state(self, batch_size: int) -> State:
        return SPEC.zeros(batch_size)

    def forward(self, ids: Tensor, state: State, lengths: Tensor | None = None) -> tuple[Tensor, State]:
        raise NotImplementedError

    def step(self, ids: Tensor, state: State) -> tuple[Tensor, State]:
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError


class NoExecutor:
    """Returns at once. Its logits are narrow, so that choosing a token from them costs little."""

    draw = staticmethod(draw_reference)
    mask = staticmethod(mask_reference)
    savepoint = None
    prompt_unit = 1
    reads_ragged = False
    decode_rounds = None

    def __init__(self, model: NoModel, *, num_rows: int, poison: bool, overlaps: bool = False) -> None:
        self.overlap = NoOverlap(self) if overlaps else None
        self.initial = model.initial_state(1)
        self.pool = StatePool(SPEC, num_rows, poison=poison)
        self._hidden = torch.zeros(num_rows, 1)
        self._logits = torch.randn(num_rows, 64, generator=torch.Generator().manual_seed(0))

    def step(self, rows: Sequence[int], ids: Sequence[int]) -> Tensor:
        return self._hidden[: len(rows)]

    def read(self, rows: Sequence[int], ids: Sequence[Sequence[int]]) -> list[Tensor]:
        return [self._hidden.expand(len(row), 1) for row in ids]

    def logits(self, hidden: Tensor) -> Tensor:
        return self._logits[: len(hidden)]


class NoOverlap:
    """Launches nothing."""

    min_rows = 1

    def __init__(self, executor: NoExecutor) -> None:
        self._executor = executor

    def pause_at(self, row: int, ids: Collection[int]) -> None: ...

    def step(self, rows: Sequence[int], inputs: NextInputs) -> Tensor:
        return self._executor.step(rows, ())

    def side_stream(self) -> AbstractContextManager[object]:
        return nullcontext()


def make_requests(num_rows: int, num_tokens: int, turn: int, *, stop: bool) -> list[GenerationRequest]:
    sampling = SamplingParams(
        max_tokens=num_tokens, temperature=0.0, ignore_eos=True, stop=("never seen",) if stop else ()
    )
    return [
        GenerationRequest(request_id=f"{turn}-{row}", prompt_ids=(1,), sampling=sampling) for row in range(num_rows)
    ]


def new_engine(tokenizer: Tokenizer, num_rows: int, *, overlaps: bool) -> Engine:
    config = EngineConfig(max_slots=num_rows, token_budget=max(256, num_rows), queue_limit=num_rows)
    executor = functools.partial(NoExecutor, overlaps=overlaps)
    return Engine(NoModel(), tokenizer, fingerprint="none", config=config, executor=executor)


def measure_steps(
    tokenizer: Tokenizer, num_rows: int, num_tokens: int, repeats: int, *, stop: bool, overlaps: bool = False
) -> float:
    """Microseconds of CPU a step of decoding, without anybody who reads; the best of the repeats."""
    engine, times = new_engine(tokenizer, num_rows, overlaps=overlaps), list[float]()
    for turn in range(repeats):
        for request in make_requests(num_rows, num_tokens, turn, stop=stop):
            engine.add(request)
        engine.step()  # takes them in
        started = time.thread_time()
        while engine.has_work:
            engine.step()
        times.append(1e6 * (time.thread_time() - started) / (num_tokens - 1))
    return min(times)


async def measure_with_readers(tokenizer: Tokenizer, num_rows: int, num_tokens: int, repeats: int) -> float:
    """The same of all the process, with the engine's thread and a reader of each request on the event loop."""
    engine, times = AsyncEngine(new_engine(tokenizer, num_rows, overlaps=False)), list[float]()

    async def read(request: GenerationRequest) -> None:
        async for _ in engine.submit(request).batches():
            pass

    await engine.start()
    for turn in range(repeats):
        started = time.process_time()
        async with asyncio.TaskGroup() as readers:
            for request in make_requests(num_rows, num_tokens, turn, stop=False):
                readers.create_task(read(request))
        times.append(1e6 * (time.process_time() - started) / num_tokens)
    await engine.stop()
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128, 512])
    parser.add_argument("--tokens", type=int, default=40, help="of each request")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer, results = BpeTokenizer.load(MEASURED_MODEL), []
    print(f"{'rows':>5}{'step, us':>10}{'a token':>9}{'with a stop string':>20}{'with readers':>14}{'ahead':>9}")
    for num_rows in args.rows:
        sizes = (tokenizer, num_rows, args.tokens, args.repeats)
        plain, stops = (measure_steps(*sizes, stop=stop) for stop in (False, True))
        readers = asyncio.run(measure_with_readers(*sizes))
        ahead = measure_steps(*sizes, stop=False, overlaps=True)
        row = {"rows": num_rows, "step_us": plain, "step_with_stop_us": stops, "with_readers_us": readers}
        results.append(row | {"ahead_us": ahead})
        print(f"{num_rows:>5}{plain:>10.0f}{plain / num_rows:>9.2f}{stops:>20.0f}{readers:>14.0f}{ahead:>9.0f}")
    print(json.dumps({"commit": source_commit(), "results": results}))


if __name__ == "__main__":
    main()
