"""What `include_routing` costs, asked for and not: `python -m benchmarks.routing_cost`. A table, then one line of JSON.

Decode steps of one engine without a probe, of one with it and nobody asking, and with one or all requests asking, in
turns on one machine; and what the engine does for the feature in a step in which nobody asks, alone, in nanoseconds.
CPU only, on pulse-books' executor.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
import timeit
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.measured_model import MEASURED_MODEL
from nsm_core.config import EngineConfig
from nsm_core.engine.engine import Engine
from nsm_core.engine.request import GenerationRequest
from nsm_core.engine.routing_watch import RoutingWatch
from nsm_core.engine.scheduler import Plan
from nsm_core.execution.choose import choose_executor
from nsm_core.inspection.probe import RoutingProbe
from nsm_core.model.loader import load_checkpoint
from nsm_core.sampling.params import SamplingParams

PROMPT = tuple(range(1, 17))


def requests_of(num_rows: int, num_asking: int, num_tokens: int) -> list[GenerationRequest]:
    sampling = SamplingParams(max_tokens=num_tokens, temperature=1.0, seed=0, ignore_eos=True)
    request = GenerationRequest(request_id="", prompt_ids=PROMPT, sampling=sampling)
    return [
        dataclasses.replace(request, request_id=str(row), include_routing=row < num_asking) for row in range(num_rows)
    ]


def decode_ms(engine: Engine, requests: list[GenerationRequest]) -> float:
    """Median of the engine's steps with every request in them."""
    for request in requests:
        engine.add(request)
    engine.step()  # reads the prompts
    times = []
    while engine.has_work:
        started = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:-1]) * 1e3


def off_ns() -> float:
    """Of `RoutingWatch.look` in a step that concerns no request that asks."""
    watched, plan = (
        RoutingWatch(RoutingProbe(load_checkpoint(MEASURED_MODEL).model)),
        Plan(decode=(0,), prefill=(), admitted=()),
    )
    call: Callable[[], Any] = lambda: watched.capture(plan, {}, None)  # type: ignore[arg-type]  # noqa: E731
    return min(timeit.repeat(call, number=100_000, repeat=5)) / 100_000 * 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    loaded = load_checkpoint(MEASURED_MODEL)
    chosen = choose_executor(loaded)
    config = EngineConfig(max_slots=max(options.rows), token_budget=512, queue_limit=8)

    def engine(probe: RoutingProbe | None) -> Engine:
        return Engine(
            chosen.model,
            loaded.tokenizer,
            fingerprint=loaded.fingerprint,
            config=config,
            executor=chosen.factory,
            probe=probe,
        )

    without, with_probe = engine(None), engine(RoutingProbe(chosen.model))
    results: dict[str, Any] = {"executor": chosen.name, "off_ns": off_ns(), "ms": {}}
    for rows in options.rows:
        cases = {"no probe": (without, 0), "nobody asks": (with_probe, 0), "one asks": (with_probe, 1)}
        if rows > 1:
            cases["all ask"] = (with_probe, rows)
        found: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(options.rounds):
            for name, (subject, num_asking) in cases.items():
                found[name].append(decode_ms(subject, requests_of(rows, num_asking, options.tokens)))
        for name, times in found.items():
            spread = f"{min(times):.2f} to {max(times):.2f}"
            print(f"{rows:3} rows  {name:12} {statistics.median(times):8.2f} ms a step  ({spread})")
        results["ms"][rows] = {name: statistics.median(times) for name, times in found.items()}
    print(f"a step in which nobody asks does {results['off_ns']:.0f} ns for it")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
