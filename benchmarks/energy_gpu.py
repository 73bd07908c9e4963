"""Whether what requests are charged adds up to what the GPU used: `python -m benchmarks.energy_gpu`.

A mixed load on one engine: prompts and answers of many lengths, up to twice as many requests as slots, some cancelled
on their way. Busy phases with idle pauses between them; over each busy phase the joules that its requests were charged
are compared with the difference of NVML's own counter, read apart from the engine. A table, then one line of JSON; the
exit status is 1 where they differ by more than 5 % in sum. Needs a GPU, and the packages of nsm_core and nvidia-ml-py.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.measured_model import MEASURED_MODEL
from nsm_core.config import EngineConfig
from nsm_core.energy.nvml import NvmlMeter
from nsm_core.engine.engine import Engine
from nsm_core.engine.request import Finished, GenerationRequest
from nsm_core.execution.choose import choose_executor
from nsm_core.model.loader import LoadedNsm, load_checkpoint
from nsm_core.sampling.params import SamplingParams
from nsm_lab.provenance import source_commit

TOLERANCE = 0.05
CANCELS_PER_STEP = 1e-3


@dataclasses.dataclass(slots=True)
class Phase:
    """One busy time. `charged`, `used`: joules."""

    num_requests: int = 0
    num_cancelled: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    charged: float = 0.0
    used: float = 0.0


class Load:
    """Keeps an engine busy."""

    def __init__(self, engine: Engine, *, vocab_size: int, max_prompt: int, max_tokens: int, seed: int = 0) -> None:
        self._engine = engine
        self._vocab_size, self._max_prompt, self._max_tokens = vocab_size, max_prompt, max_tokens
        self._random = random.Random(seed)
        self._num_requests = 0
        self._running: set[str] = set()

    def run(self, *, seconds: float, num_at_once: int) -> Phase:
        """New requests for so long, then those that run to their end."""
        phase, began = Phase(), time.monotonic()
        while (is_open := time.monotonic() - began < seconds) or self._engine.has_work:
            while is_open and len(self._running) < num_at_once:
                self._add()
            if self._running and self._random.random() < CANCELS_PER_STEP:
                self._engine.cancel(self._random.choice(sorted(self._running)))
            for request_id, event in self._engine.step():
                if isinstance(event, Finished):
                    self._running.discard(request_id)
                    _count(phase, event)
        phase.seconds = time.monotonic() - began
        return phase

    def _add(self) -> None:
        self._num_requests += 1
        request_id = str(self._num_requests)
        prompt_len = round(self._max_prompt ** self._random.random())  # as many short ones as long ones
        prompt_ids = tuple(self._random.randrange(1, self._vocab_size) for _ in range(prompt_len))
        max_tokens = self._random.randint(1, self._max_tokens)
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self._engine.add(GenerationRequest(request_id=request_id, prompt_ids=prompt_ids, sampling=sampling))
        self._running.add(request_id)


def _count(phase: Phase, finished: Finished) -> None:
    phase.num_requests += 1
    phase.num_cancelled += finished.reason == "abort"
    phase.num_tokens += finished.completion_tokens
    phase.charged += sum(use.joules for use in finished.energy if use.source == "gpu")


def measure(load: Load, counter: Callable[[], float], args: argparse.Namespace) -> list[Phase]:
    """`counter`: joules, as the device tells them."""
    load.run(seconds=args.warm_up, num_at_once=args.slots)
    phases = []
    for number in range(args.phases):
        time.sleep(args.pause)
        before = counter()
        phase = load.run(seconds=args.seconds, num_at_once=args.slots * (1 + number % 2))
        phase.used = counter() - before
        phases.append(phase)
        print(
            f"phase {number + 1}: {phase.num_requests:>5} requests ({phase.num_cancelled} cancelled), "
            f"{phase.num_tokens:>7} tokens in {phase.seconds:>5.1f} s, charged {phase.charged:>9.1f} J, "
            f"counter {phase.used:>9.1f} J ({off(phase.charged, phase.used):+.2%})"
        )
    return phases


def off(charged: float, used: float) -> float:
    return charged / used - 1 if used else 0.0


def cost_us(work: Callable[[], object], repeats: int = 100) -> float:
    """Microseconds."""
    began = time.perf_counter()
    for _ in range(repeats):
        work()
    return round((time.perf_counter() - began) / repeats * 1e6, 1)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MEASURED_MODEL, help="model directory or name")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--executor", default="auto")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--token-budget", type=int, default=2048)
    parser.add_argument("--max-prompt", type=int, default=2048)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--phases", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--pause", type=float, default=2.0)
    parser.add_argument("--warm-up", type=float, default=5.0)
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="share that the sums may differ by")
    return parser.parse_args(argv)


def main(
    argv: Sequence[str] | None = None, *, loaded: LoadedNsm | None = None, nvml: Any = None, uuid: str | None = None
) -> int:
    """`loaded`, `nvml` (pynvml) and `uuid` (of the GPU): None for the real ones."""
    args = parse(argv)
    loaded = loaded or load_checkpoint(args.model, args.device)
    if nvml is None:
        import pynvml as nvml
    if uuid is None:
        uuid = f"GPU-{torch.cuda.get_device_properties(args.device).uuid}"
    meter = NvmlMeter([uuid], library=nvml)
    handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    chosen = choose_executor(loaded, args.executor)
    engine = Engine(
        loaded.model,
        loaded.tokenizer,
        fingerprint=loaded.fingerprint,
        config=EngineConfig(max_slots=args.slots, token_budget=args.token_budget),
        executor=chosen.factory,
        meter=meter,
    )
    load = Load(engine, vocab_size=loaded.tokenizer.vocab_size, max_prompt=args.max_prompt, max_tokens=args.max_tokens)
    phases = measure(load, lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3, args)
    charged, used = sum(phase.charged for phase in phases), sum(phase.used for phase in phases)
    costs_us = {"reading_us": cost_us(meter.read), "look_us": cost_us(meter.sample)}
    meter.close()
    is_good = abs(off(charged, used)) <= args.tolerance
    verdict = f"{off(charged, used):+.2%} (at most {args.tolerance:.0%})"
    print(f"in all: charged {charged:.1f} J, counter {used:.1f} J, {verdict}")
    about = {
        "commit": source_commit(),
        "model": loaded.name,
        "executor": chosen.name,
        "numerics": chosen.numerics,
        "slots": args.slots,
        **costs_us,
        "off": off(charged, used),
        "is_good": is_good,
        "phases": [dataclasses.asdict(phase) for phase in phases],
    }
    print(json.dumps(about))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
