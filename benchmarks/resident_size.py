"""Memory of a process that serves a model: `python -m benchmarks.resident_size`. A table, then one line of JSON.

Each executor gets a process of its own, which is measured as it grows: the bare interpreter, torch, the product's
modules, the model ready to serve, all rows of the state pool in use. The first three are the same for any model; what
the model adds is compared with what it cannot do without, its weights' file and the state pool. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROMPT_TOKENS = 64
MIB = 2**20


def memory_mib(*names: str) -> float:
    """Lines of /proc/self/smaps_rollup or /proc/self/status, summed."""
    text = Path("/proc/self/smaps_rollup").read_text() + Path("/proc/self/status").read_text()
    lines = [line.split() for line in text.splitlines()]
    found = {line[0].rstrip(":"): int(line[1]) for line in lines if line[-1] == "kB"}
    return sum(found[name] for name in names) / 1024


def measure(model: Path | None, executor: str, max_slots: int) -> dict[str, Any]:
    """In a process that has imported nothing yet."""
    stages = {"interpreter": memory_mib("Rss")}
    import torch

    torch.set_num_threads(1)
    stages["torch"] = memory_mib("Rss")
    from nsm_core.config import EngineConfig
    from nsm_core.model.bundled import find_checkpoint
    from nsm_core.model.identity import WEIGHTS_FILE
    from nsm_core.model.loader import load_checkpoint
    from service.backends.local import LocalBackend

    stages["modules"], private_before = memory_mib("Rss"), memory_mib("RssAnon")
    started = time.perf_counter()
    loaded = load_checkpoint(model)
    backend = LocalBackend(loaded, EngineConfig(max_slots=max_slots), executor=executor)  # type: ignore[arg-type]
    del loaded
    load_s = time.perf_counter() - started
    asyncio.run(serve(backend, max_slots, stages))
    return {
        "executor": executor,
        "rss_mib": stages,
        "peak_mib": memory_mib("VmHWM"),
        "private_mib": memory_mib("RssAnon") - private_before,
        "load_s": load_s,
        "weights_mib": (find_checkpoint(model) / WEIGHTS_FILE).stat().st_size / MIB,
        "pool_mib": backend.stats().state_pool_bytes / MIB,
    }


async def serve(backend: Any, num_rows: int, stages: dict[str, float]) -> None:
    """Every row of the pool reads a prompt and samples some tokens."""
    from nsm_core.engine.request import Finished, GenerationRequest
    from nsm_core.sampling.params import SamplingParams

    await backend.start()
    stages["ready"] = memory_mib("Rss")
    sampling = SamplingParams(max_tokens=16, temperature=1.0, seed=0, ignore_eos=True)
    prompt = tuple(range(1, 1 + PROMPT_TOKENS))
    requests = (GenerationRequest(request_id=str(row), prompt_ids=prompt, sampling=sampling) for row in range(num_rows))
    for handle in [backend.submit(request) for request in requests]:
        async for *_, last in handle.batches():
            if isinstance(last, Finished) and last.error is not None:
                raise last.error
    stages["all rows used"] = memory_mib("Rss")
    await backend.stop()


def in_new_process(args: argparse.Namespace, executor: str, max_slots: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.resident_size", "--alone", "--executors", executor]
    command += ["--slots", str(max_slots), *([] if args.model is None else ["--model", str(args.model)])]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    measured: dict[str, Any] = json.loads(result.stdout)
    return measured


def show(run: dict[str, Any]) -> None:
    stages, needed = run["rss_mib"], run["weights_mib"] + run["pool_mib"]
    run["model_mib"] = stages["all rows used"] - stages["modules"]
    run["ratio"] = run["model_mib"] / needed
    fixed = f"{stages['interpreter']:.0f} + {stages['torch'] - stages['interpreter']:.0f}"
    print(f"\n{run['executor']}, pool of {run['pool_mib']:.0f} MiB, weights of {run['weights_mib']:.0f} MiB")
    print(f"  interpreter + torch + modules   {fixed} + {stages['modules'] - stages['torch']:.0f} MiB")
    print(f"  ready to serve after {run['load_s']:.1f} s      {stages['ready'] - stages['modules']:.0f} MiB more")
    print(f"  all rows used                   {run['model_mib']:.0f} MiB more: {run['ratio']:.2f} of weights and pool")
    print(f"    without code of libraries     {run['private_mib']:.0f} MiB: {run['private_mib'] / needed:.2f}")
    print(f"  resident in all, at the peak    {stages['all rows used']:.0f}, {run['peak_mib']:.0f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("pulse-books"), help="model directory or name")
    parser.add_argument("--executors", nargs="+", default=["native", "eager"], help="one after the other")
    parser.add_argument("--slots", type=int, nargs="+", default=[8, 32], help="rows of the state pool")
    parser.add_argument("--alone", action="store_true", help="measure this process, and print JSON only")
    args = parser.parse_args()
    if args.alone:
        print(json.dumps(measure(args.model, args.executors[0], args.slots[0])))
        return
    runs = [in_new_process(args, executor, slots) for executor in args.executors for slots in args.slots]
    for run in runs:
        show(run)
    from nsm_lab.provenance import source_commit

    print(json.dumps({"commit": source_commit(), "runs": runs}))


if __name__ == "__main__":
    main()
