"""The executor for a GPU, checked and measured: `python -m benchmarks.gpu_decode`. One line of JSON a result.

First the checks of `benchmarks/gpu_decode_checks.py`, then, in the order of importance and until the time is over:

- a step at several batch sizes: hidden vectors, logits and greedy choice in one graph, beside its floor. The floor is
  the matrices once, and what the states must move (slots and tails read and written, rings read), over the rate of a
  large copy on this device;
- what the parts of a step take; the eager step; a prompt of a million tokens in chunks, with the peak of memory; the
  engine around it all;
- the same products through the vendor's library, which is what batch invariance costs; programs of other shapes.

A part that fails says so and the next one begins. `--tiny` runs everything that can in a small size without a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernels are imported

from benchmarks import gpu_decode_checks as checks
from benchmarks import gpu_decode_timings as timings
from benchmarks.measured_model import MEASURED_MODEL
from nsm_core.config import ModelConfig
from nsm_core.execution.cuda.options import CudaOptions, CudaWeights
from nsm_core.model.nsm import NsmModel
from nsm_lab.bench.machine import cpu_name

TINY = {"d_model": 64, "num_layers": 4, "num_heads": 2, "num_kv_heads": 1, "num_memory_slots": 16, "write_top_k": 16}
TINY |= {"mlp_hidden": 96, "vocab_size": 128, "window": 70}

Row = dict[str, Any]


def load_model(is_tiny: bool, device: torch.device) -> NsmModel:
    """pulse-books; random weights of its shape where its files cannot be read."""
    config = ModelConfig.load(MEASURED_MODEL / "config.json")
    if not is_tiny:
        try:
            from nsm_core.model.storage import read_model

            return read_model(MEASURED_MODEL)[0].to(device)
        except Exception as error:
            say("model", {"random_weights": f"{type(error).__name__}: {error}"})
    torch.manual_seed(0)
    model = NsmModel(dataclasses.replace(config, **TINY) if is_tiny else config)
    for block in model.layers:
        for linear in (block.mixer.out, block.mlp.down):
            torch.nn.init.normal_(linear.weight, std=model.config.d_model**-0.5)
    return model.eval().requires_grad_(False).to(device)


def commit() -> str | None:
    try:
        from nsm_lab.provenance import source_commit
    except ImportError:  # it knows the versions of packages that are not needed here
        return None
    return source_commit()


def say(part: str, row: Row) -> None:
    shown = {key: float(f"{value:.5g}") if isinstance(value, float) else value for key, value in row.items()}
    print(json.dumps({"part": part} | shown), flush=True)


def all_checks(model: NsmModel, has_gpu: bool) -> dict[str, Callable[[], Iterator[Row]]]:
    fp32 = CudaOptions(weights=CudaWeights.FP32, graphs=False)
    if not has_gpu:
        return {
            "linear": lambda: checks.check_linears(model, torch.float32, (1, 70)),
            "block": lambda: checks.check_blocks(model),
            "step": lambda: checks.check_steps(model, fp32, num_steps=2, num_rows=3),
            "invariance": lambda: checks.check_invariance(model, fp32, (1, 3)),
            "prompts": lambda: checks.check_prompts(model, fp32, (1, 3), length=150),
            "sampler": lambda: checks.check_sampler(torch.randn(8, 200)),
        }
    bf16 = CudaOptions(weights=CudaWeights.BF16)
    return {
        "linear bf16": lambda: checks.check_linears(model, torch.bfloat16, (3, 200)),
        "same bits": lambda: checks.check_same_bits(model, torch.bfloat16),
        "block fp32": lambda: checks.check_blocks(model),
        "step fp32": lambda: checks.check_steps(model, fp32, num_steps=8, num_rows=5),
        "step bf16": lambda: checks.check_steps(model, bf16, num_steps=16, num_rows=24),
        "replays": lambda: checks.check_replays(model, CudaWeights.BF16),
        "invariance": lambda: checks.check_invariance(model, bf16, (*checks.BATCHES, 512)),
        "prompts": lambda: checks.check_prompts(model, bf16),
        "sampler": lambda: checks.check_sampler(3 * torch.randn(256, model.config.vocab_size, device="cuda")),
    }


class DeviceLost(Exception):
    """This process cannot use the device any more."""


def run_part(name: str, work: Callable[[], Iterator[Row]], deadline: float) -> bool:
    """Says what a part gives; False when a check failed."""
    if time.monotonic() > deadline:
        say(name, {"error": "no time left"})
        return True
    good, started = True, time.monotonic()
    try:
        for row in work():
            say(name, row)
            good = good and row.get("ok", True)
    except Exception as error:
        # one part that fails must not cost the others
        say(name, {"error": f"{type(error).__name__}: {str(error).strip()[:400]}", "ok": False})
        traceback.print_exc(limit=-4, file=sys.stderr)
        good = False
        if "CUDA error" in str(error):
            raise DeviceLost from error
    say(name, {"part_s": round(time.monotonic() - started, 2)})
    return good


def go_on(parts: list[str], budget_s: float) -> int:
    """The rest in a new process; the exit status of a run with a failed part."""
    if parts and budget_s > 0:
        command = [
            sys.executable,
            "-m",
            "benchmarks.gpu_decode",
            "--parts",
            ",".join(parts),
            "--budget-s",
            str(budget_s),
        ]
        subprocess.run(command, check=False)
    return 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-s", type=float, default=240.0, help="no part is begun after that")
    parser.add_argument("--parts", default="", help="only the parts of these names, comma-separated")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    if not (has_gpu or options.tiny):
        sys.exit("benchmarks.gpu_decode needs a GPU; --tiny runs its checks anywhere")
    deadline = time.monotonic() + options.budget_s
    device = torch.device("cuda" if has_gpu else "cpu")
    name = torch.cuda.get_device_name() if has_gpu else cpu_name()
    say("header", {"commit": commit(), "torch": torch.__version__, "device": name})
    model = load_model(options.tiny, device)
    torch.manual_seed(0)
    parts = all_checks(model, has_gpu)
    if has_gpu:
        bench = timings.Bench(model, 512)
        fp16 = CudaOptions(weights=CudaWeights.FP16)
        parts |= {
            "copy": lambda: timings.copy_rate(bench),
            "step times": lambda: timings.step_times(bench),
            "parts": lambda: timings.part_times(bench),
            "eager": lambda: timings.eager_steps(bench),
            "long prompt": lambda: timings.long_prompt(bench, 2**20),
            "engine": lambda: timings.engine_steps(bench),
            "arrivals": lambda: timings.engine_arrivals(bench),
            "prompt times": lambda: timings.prompt_times(bench),
            "library products": lambda: timings.library_products(bench),
            "variants": lambda: timings.variants(bench),
            "step fp16": lambda: checks.check_steps(model, fp16, num_steps=16, num_rows=24),
        }
    wanted = [part for part in parts if not options.parts or part in options.parts.split(",")]
    results = []
    for index, part in enumerate(wanted):
        try:
            results.append(run_part(part, parts[part], deadline))
        except DeviceLost:
            sys.exit(go_on(wanted[index + 1 :], deadline - time.monotonic()))
    say("end", {"ok": all(results)})
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
