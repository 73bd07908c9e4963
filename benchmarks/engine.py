"""Speed of the engine in this process: `python -m benchmarks.engine`. A table, then one line of JSON.

Decode tokens/s by batch size, prefill tokens/s by prompt length, and what a resumed session costs against reading the
same text again. Times are medians of several runs after a warm-up; `cpu` is the CPU time of this process, which a busy
neighbour does not distort.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.measured_model import MEASURED_MODEL
from nsm_core.config import EngineConfig
from nsm_core.engine.engine import Engine
from nsm_core.engine.request import EndState, Finished, GenerationRequest, Resume
from nsm_core.execution.choose import ChosenExecutor, choose_executor
from nsm_core.execution.names import EXECUTOR_NAMES
from nsm_core.model.loader import LoadedNsm, load_checkpoint
from nsm_core.sampling.params import SamplingParams
from nsm_lab.bench.machine import cpu_name
from nsm_lab.provenance import source_commit

Timing = tuple[float, float]  # wall and CPU seconds


class Bench:
    """One engine and the requests that measure it."""

    def __init__(self, loaded: LoadedNsm, executor: ChosenExecutor, *, max_slots: int, token_budget: int) -> None:
        self._vocab_size = loaded.tokenizer.vocab_size
        self._fingerprint = loaded.fingerprint
        config = EngineConfig(max_slots=max_slots, token_budget=token_budget, speculation="off")
        self._engine = Engine(
            loaded.model, loaded.tokenizer, fingerprint=loaded.fingerprint, config=config, executor=executor.factory
        )
        self._random = random.Random(0)
        self._num_requests = 0

    def ids(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(1, self._vocab_size) for _ in range(num_tokens))

    def run(
        self, prompts: list[tuple[int, ...]], *, max_tokens: int, resume: Resume | None = None, keep: bool = False
    ) -> list[EndState | None]:
        """All prompts to their end."""
        for prompt in prompts:
            self._num_requests += 1
            sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
            request_id = str(self._num_requests)
            self._engine.add(
                GenerationRequest(
                    request_id=request_id, prompt_ids=prompt, sampling=sampling, resume=resume, keep_state=keep
                )
            )
        ends = []
        while self._engine.has_work:
            ends += [event.end_state for _, event in self._engine.step() if isinstance(event, Finished)]
        return ends

    def resume_of(self, num_tokens: int) -> Resume:
        """The state after a text of `num_tokens`."""
        (end,) = self.run([self.ids(num_tokens)], max_tokens=1, keep=True)
        if end is None:
            raise RuntimeError("the engine kept no state")
        return Resume(
            state=end.state,
            position=end.position,
            fingerprint=self._fingerprint,
            generated_counts=end.generated_counts,
        )


def timed(work: Callable[[], object], repeats: int) -> Timing:
    """Medians over `repeats` runs, after one that is not counted."""
    work()
    walls, cpus = [], []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return statistics.median(walls), statistics.median(cpus)


def measure(bench: Bench, args: argparse.Namespace) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []

    def add(name: str, num_tokens: int, timing: Timing) -> None:
        wall, cpu = timing
        rows.append({"what": name, "tokens": num_tokens, "wall_ms": wall * 1e3, "cpu_ms": cpu * 1e3})
        print(f"{name:<44} {wall * 1e3:>10.1f} {cpu * 1e3:>10.1f} {num_tokens / wall:>10.0f} {num_tokens / cpu:>10.0f}")

    print(f"{'':<44} {'wall ms':>10} {'cpu ms':>10} {'tok/s':>10} {'tok/cpu-s':>10}")
    for batch in args.batches:
        prompts = [bench.ids(1) for _ in range(batch)]
        timing = timed(lambda prompts=prompts: bench.run(prompts, max_tokens=args.decode_tokens), args.repeats)  # type: ignore[misc]
        add(f"decode {args.decode_tokens} tokens, batch {batch}", batch * args.decode_tokens, timing)
    for length in args.lengths:
        prompt = bench.ids(length)
        add(f"read {length} tokens", length, timed(lambda p=prompt: bench.run([p], max_tokens=1), args.repeats))  # type: ignore[misc]
        resume = bench.resume_of(length)
        turn = bench.ids(16)
        timing = timed(lambda r=resume, t=turn: bench.run([t], max_tokens=1, resume=r), args.repeats)  # type: ignore[misc]
        add(f"first token of a 16-token turn, resumed at {length}", 16, timing)
    return rows


def header(loaded: LoadedNsm, threads: int) -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "commit": source_commit(),
        "threads": threads,
        "cpu": cpu_name(),
        "model": loaded.name,
        "fingerprint": loaded.fingerprint,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MEASURED_MODEL, help="model directory or name")
    parser.add_argument("--executors", nargs="+", choices=EXECUTOR_NAMES, default=["auto"], help="one after the other")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 16, 32])
    parser.add_argument("--decode-tokens", type=int, default=32)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--token-budget", type=int, default=256)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    loaded = load_checkpoint(args.model)
    runs = []
    for wanted in args.executors:
        executor = choose_executor(loaded, wanted)
        bench = Bench(loaded, executor, max_slots=max(args.batches), token_budget=args.token_budget)
        print(f"{executor.name} ({executor.numerics})")
        runs.append({"executor": executor.name, "numerics": executor.numerics, "rows": measure(bench, args)})
    print(json.dumps({**header(loaded, args.threads), "runs": runs}))


if __name__ == "__main__":
    main()
