"""Python's part of a step: `python -m benchmarks.host_step`. A table, then one line of JSON.

The engine with an executor that computes nothing (its logits are of one array, made beforehand), by itself, and in its
thread with a reader of every request on the event loop; then, for executors that look ahead, with steps that are
launched and waited for later, one token at a time and ROUNDS in a launch. CPU time of a token of all rows; the best of
several runs, since a busy neighbour only adds to it. Requests whose steps look ahead have tags, as in a server.

`--prompts` measures something else: BESIDE rows decode, and a new prompt comes each STEPS_A_PROMPT launches. CPU time
of its admission, of a call of `step` that reads it and of one that reads none, with the batches and launches of a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import functools
import json
import random
import time
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from benchmarks.measured_model import MEASURED_MODEL
from nsm_core.config import EngineConfig
from nsm_core.engine.async_engine import AsyncEngine
from nsm_core.engine.engine import Engine
from nsm_core.engine.request import GenerationRequest
from nsm_core.execution.base import NextInputs, Rounds
from nsm_core.sampling.device import PendingTokens
from nsm_core.sampling.masks import mask_reference
from nsm_core.sampling.params import SamplingParams
from nsm_core.sampling.sampler import draw_reference
from nsm_core.state.pool import StatePool
from nsm_core.state.spec import POSITION, State, StateSpec, TensorSpec
from nsm_core.tokenizer import BpeTokenizer, Tokenizer
from nsm_lab.provenance import source_commit

ROUNDS = 4  # of a launch
BESIDE = 128  # rows that decode beside prompts
PROMPT_LEN, PROMPT_UNIT = 1_000, 64  # tokens
STEPS_A_PROMPT = 24  # 20 prompts a second, beside launches of 2.1 ms
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
    prepare_more = None

    def __init__(self, model: NoModel, *, num_rows: int, poison: bool, num_rounds: int | None = None) -> None:
        """`num_rounds`: of a launch that is waited for later; None: every step is waited for."""
        self.initial = model.initial_state(1)
        self.pool = StatePool(SPEC, num_rows, poison=poison)
        self.overlap = None if num_rounds is None else NoOverlap(self, num_rounds)
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

    def __init__(self, executor: NoExecutor, num_rounds: int) -> None:
        """`num_rounds`: of a launch, at most."""
        self._executor, self._num_rounds = executor, num_rounds
        self._ids = torch.full((max(num_rounds, 1), executor.pool.num_rows), 7)

    def pause_at(self, row: int, ids: Collection[int]) -> None: ...

    def step(self, rows: Sequence[int], inputs: NextInputs) -> Tensor:
        return self._executor.step(rows, ())

    def most_rounds(self, num_rows: int) -> int:
        return self._num_rounds

    def decode(self, rows: Sequence[int], inputs: NextInputs, rounds: Rounds) -> PendingTokens:
        ids = self._ids[: rounds.number, : len(rows)]
        return PendingTokens(ids[-1], ids)

    def side_stream(self) -> AbstractContextManager[object]:
        return nullcontext()


def make_requests(num_rows: int, num_tokens: int, turn: int, *, stop: bool) -> list[GenerationRequest]:
    sampling = SamplingParams(
        max_tokens=num_tokens, temperature=0.0, ignore_eos=True, stop=("never seen",) if stop else ()
    )
    return [
        GenerationRequest(request_id=f"{turn}-{row}", prompt_ids=(1,), sampling=sampling) for row in range(num_rows)
    ]


def new_engine(tokenizer: Tokenizer, num_rows: int, *, num_rounds: int | None = None) -> Engine:
    config = EngineConfig(max_slots=num_rows, token_budget=max(256, num_rows), queue_limit=num_rows)
    executor = functools.partial(NoExecutor, num_rounds=num_rounds)
    return Engine(NoModel(), tokenizer, fingerprint="none", config=config, executor=executor)


def measure_steps(
    tokenizer: Tokenizer,
    num_rows: int,
    num_tokens: int,
    repeats: int,
    *,
    stop: bool = False,
    num_rounds: int | None = None,
) -> float:
    """Microseconds of CPU a token of all rows, without anybody who reads; the best of the repeats. `num_rounds`: see
    NoExecutor.
    """
    engine, times = new_engine(tokenizer, num_rows, num_rounds=num_rounds), list[float]()
    for turn in range(repeats):
        for index, request in enumerate(make_requests(num_rows, num_tokens, turn, stop=stop)):
            engine.add(request, tag=None if num_rounds is None else index)
        engine.step()  # takes them in
        started = time.thread_time()
        while engine.has_work:
            engine.step()
            engine.take_tokens()
        times.append(1e6 * (time.thread_time() - started) / (num_tokens - 1))
    return min(times)


def prompt_engine(tokenizer: Tokenizer) -> Engine:
    """As on a GPU: launches of several tokens, prompts in units, a batch of prompts a step."""
    config = EngineConfig(max_slots=512, token_budget=2048, queue_limit=512, prompt_tokens_beside=1024)
    executor = functools.partial(PromptExecutor, num_rounds=ROUNDS)
    return Engine(NoModel(), tokenizer, fingerprint="none", config=config, executor=executor)


class PromptExecutor(NoExecutor):
    """One whose prompts are read in units."""

    prompt_unit = PROMPT_UNIT

    def read(self, rows: Sequence[int], ids: Sequence[Sequence[int]]) -> list[Tensor]:
        return [self._hidden[:1].expand(len(row), 1) for row in ids]


def measure_prompts(tokenizer: Tokenizer, num_prompts: int) -> dict[str, list[float]]:
    """Microseconds of CPU: of `add` of each prompt, of the call of `step` that launches its reading, of the next one,
    which waits for it, and of the others.
    """
    engine, generator = prompt_engine(tokenizer), random.Random(0)
    times: dict[str, list[float]] = {"admission": [], "with a prompt": [], "after it": [], "without": []}
    sampling = SamplingParams(max_tokens=10**6, temperature=0.0, ignore_eos=True)
    for row in range(BESIDE):
        engine.add(GenerationRequest(request_id=f"row-{row}", prompt_ids=(1,), sampling=sampling), tag=row)
    for _ in range(STEPS_A_PROMPT):
        timed_step(engine)
    sampling = dataclasses.replace(sampling, max_tokens=64)
    for number in range(num_prompts):
        ids = tuple(generator.choices(range(tokenizer.vocab_size), k=PROMPT_LEN))
        request = GenerationRequest(request_id=f"prompt-{number}", prompt_ids=ids, sampling=sampling)
        started, num_read = time.thread_time(), engine.stats().tokens_computed
        engine.add(request, tag=BESIDE + number)
        times["admission"].append(1e6 * (time.thread_time() - started))
        for step in range(STEPS_A_PROMPT):
            times[("with a prompt", "after it")[step] if step < 2 else "without"].append(timed_step(engine))
            if step == 1 and engine.stats().tokens_computed != num_read + PROMPT_LEN:
                raise RuntimeError("the prompt was not read as a whole, in the next step")
    return times


def timed_step(engine: Engine) -> float:
    """Microseconds of CPU."""
    started = time.thread_time()
    engine.step()
    engine.take_tokens()
    return 1e6 * (time.thread_time() - started)


async def measure_with_readers(tokenizer: Tokenizer, num_rows: int, num_tokens: int, repeats: int) -> float:
    """The same of all the process, with the engine's thread and a reader of each request on the event loop."""
    engine, times = AsyncEngine(new_engine(tokenizer, num_rows)), list[float]()

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


def print_prompts(times: dict[str, list[float]]) -> dict[str, list[float]]:
    """Medians and 99th percentiles."""
    figures = {name: [float(at) for at in np.percentile(taken, (50, 99))] for name, taken in times.items()}
    print(f"{BESIDE} rows decode, prompts of {PROMPT_LEN} tokens; CPU us, p50 and p99")
    for name, (middle, high) in figures.items():
        print(f"{name:>15}{middle:>9.0f}{high:>9.0f}")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128, 512])
    parser.add_argument("--tokens", type=int, default=40, help="of each request")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--prompts", type=int, default=0, help="measure so many prompts beside rows that decode, alone")
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer, results = BpeTokenizer.load(MEASURED_MODEL), []
    if args.prompts:
        beside = print_prompts(measure_prompts(tokenizer, args.prompts))
        print(json.dumps({"commit": source_commit(), "prompts": beside}))
        return
    columns = ("rows", "step, us", "a token", "with a stop string", "with readers", "ahead", "in rounds")
    widths = (5, 10, 9, 20, 14, 9, 11)
    print("".join(f"{name:>{width}}" for name, width in zip(columns, widths, strict=True)))
    for num_rows in args.rows:
        sizes = (tokenizer, num_rows, args.tokens, args.repeats)
        plain, stops = (measure_steps(*sizes, stop=stop) for stop in (False, True))
        readers = asyncio.run(measure_with_readers(*sizes))
        ahead, rounds = (measure_steps(*sizes, num_rounds=number) for number in (0, ROUNDS))
        row = {"rows": num_rows, "step_us": plain, "step_with_stop_us": stops, "with_readers_us": readers}
        results.append(row | {"ahead_us": ahead, "in_rounds_us": rounds})
        figures = (f"{plain:.0f}", f"{plain / num_rows:.2f}", *(f"{us:.0f}" for us in (stops, readers, ahead, rounds)))
        cells = zip((str(num_rows), *figures), widths, strict=True)
        print("".join(f"{cell:>{width}}" for cell, width in cells))
    print(json.dumps({"commit": source_commit(), "results": results}))


if __name__ == "__main__":
    main()
