"""Whole models side by side on one GPU: `python -m benchmarks.gpu_models`. One line of JSON a cell, then tables.

Measured are prefill tokens/s of one row at 2K to 131K tokens, training tokens/s at 1K to 32K tokens a row with 32K
tokens a batch (forward and backward; the same with AdamW), and the time of an eager decode step at 1, 64 and 512 rows,
each with the peak of memory. `benchmarks/gpu_subjects.py` says what the models are and in which precision they run.
Times are medians of several repeats after a first call that is not counted, with the fastest and the slowest beside.

The public models need the packages flash-linear-attention, fla-core and einops, all pure Python
(`pip install --no-deps`), and transformers; a model that cannot be built fails its own cells only. Their kernels choose
among configurations when first run: each tries at most `--public-configs` of its list, evenly spaced. The kernels of
all models are compiled before the measurement, by processes side by side (`--warm-up-s`, 0: not at all). `--tiny` runs
our models in a small size, on a CPU too: it shows that the benchmark works and measures nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.gpu_subjects import SUBJECTS, Subject, keep_few_configurations
from nsm_lab.bench.machine import cpu_name
from nsm_lab.provenance import source_commit

SIZES = {
    "prefill": (2048, 8192, 32768, 131072),  # tokens of the prompt
    "decode": (1, 64, 512),  # rows
    "train": (1024, 8192, 32768),  # tokens a row
}
WARM_UP_SIZES = SIZES | {"prefill": (2048,), "decode": (1, 64)}  # only compiled training depends on all shapes
TINY_SIZES = {"prefill": (64, 128), "decode": (1, 4), "train": (64, 128)}
TRAIN_TOKENS, TINY_TRAIN_TOKENS = 32768, 256  # a batch
MAX_REPEATS = 40
OWN = ("pulse", "hybrid", "transformer")

Row = dict[str, Any]


class Timer:
    """Repeats some work within a time limit; device time on a GPU, wall time elsewhere."""

    def __init__(self, device: torch.device, limit_s: float, compile_only: bool) -> None:
        self._device, self._limit_s, self._compile_only = device, limit_s, compile_only

    def measure(self, work: Callable[[], object]) -> Row:
        """Milliseconds: median, fastest, slowest; and the peak of memory while it was repeated."""
        started = time.monotonic()
        self._once(work)
        row: Row = {"first_call_s": round(time.monotonic() - started, 2)}
        if self._compile_only:
            return row
        self._once(work)
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        times, started = [], time.monotonic()
        while len(times) < 3 or (len(times) < MAX_REPEATS and time.monotonic() - started < self._limit_s):
            times.append(self._once(work))
        row |= {"ms": statistics.median(times), "ms_min": min(times), "ms_max": max(times), "repeats": len(times)}
        if self._device.type == "cuda":
            row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        return row

    def _once(self, work: Callable[[], object]) -> float:
        if self._device.type != "cuda":
            started = time.perf_counter()
            work()
            return 1e3 * (time.perf_counter() - started)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)


def random_ids(subject: Subject, *shape: int, device: torch.device) -> torch.Tensor:
    return torch.randint(1, subject.vocab_size, shape, device=device)


def prefill_rows(subject: Subject, num_tokens: int, device: torch.device, timer: Timer) -> Iterator[Row]:
    row = timer.measure(subject.prefill(random_ids(subject, 1, num_tokens, device=device)))
    yield {"what": "prefill", "tokens": num_tokens} | row


def decode_rows(subject: Subject, batch: int, device: torch.device, timer: Timer) -> Iterator[Row]:
    row = timer.measure(subject.decode(random_ids(subject, batch, device=device)))
    yield {"what": "decode", "tokens": batch} | row


def training_rows(
    subject: Subject, seq_len: int, device: torch.device, timer: Timer, batch_tokens: int
) -> Iterator[Row]:
    """Forward and backward, then the same with an optimiser step."""
    num_rows = max(1, batch_tokens // seq_len)
    module, loss = subject.training(random_ids(subject, num_rows, seq_len, device=device))
    size = {"tokens": num_rows * seq_len, "rows": num_rows}

    def forward_backward() -> None:
        module.zero_grad(set_to_none=True)
        loss().backward()

    yield {"what": "train"} | size | timer.measure(forward_backward)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=device.type == "cuda")

    def step() -> None:
        forward_backward()
        optimizer.step()

    yield {"what": "train+adamw"} | size | timer.measure(step)


class Run:
    """The cells one after the other, until the time is over."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.timer = Timer(self.device, options.cell_s, options.compile_only)
        self.sizes = WARM_UP_SIZES if options.compile_only else TINY_SIZES if options.tiny else SIZES
        self.deadline = time.monotonic() + options.budget_s

    def cells(self) -> Iterator[tuple[str, str, int]]:
        for kind in self.options.kinds:
            for size in self.sizes[kind]:
                for name in self.options.models:
                    yield name, kind, size

    def all(self) -> Iterator[Row]:
        for name, kind, size in self.cells():
            cell = {"model": name, "what": kind, "size": size}
            if time.monotonic() > self.deadline:
                yield cell | {"error": "no time left"}
                continue
            try:
                for row in self._rows(name, kind, size):
                    rate = {"tok_per_s": round(1e3 * row["tokens"] / row["ms"])} if "ms" in row else {}
                    yield cell | row | rate
            except Exception as error:
                # one model that fails must not cost the others their measurement
                yield cell | {"error": f"{type(error).__name__}: {str(error).strip()[:300]}"}
                traceback.print_exc(limit=-3, file=sys.stderr)
            self._forget()

    def _rows(self, name: str, kind: str, size: int) -> Iterator[Row]:
        torch.manual_seed(0)
        subject = SUBJECTS[name](self.options.tiny)
        if kind == "prefill":
            return prefill_rows(subject, size, self.device, self.timer)
        if kind == "decode":
            return decode_rows(subject, size, self.device, self.timer)
        tokens = TINY_TRAIN_TOKENS if self.options.tiny else TRAIN_TOKENS
        return training_rows(subject, size, self.device, self.timer, tokens)

    def _forget(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch._dynamo.reset()  # compiled blocks hold on to their weights
            torch.cuda.empty_cache()


def warm_up(options: argparse.Namespace) -> Row:
    """Compiles every model's kernels into the caches on disk, a process for each model and kind."""
    # no choice between configurations is kept here: processes that share the device would choose at random
    env = os.environ | {"FLA_CACHE_RESULTS": "0", "TRITON_CACHE_AUTOTUNING": "0", "TORCHINDUCTOR_COMPILE_THREADS": "4"}
    command = [sys.executable, "-m", "benchmarks.gpu_models", "--compile-only", "--warm-up-s", "0"]
    command += ["--public-configs", str(options.public_configs), "--budget-s", str(options.warm_up_s)]
    started, running = time.monotonic(), {}
    for name in (model for model in options.models if model != "llama"):  # which has no kernels to compile
        for kind in options.kinds:
            arguments = [*command, "--models", name, "--kinds", kind]
            running[f"{name}/{kind}"] = subprocess.Popen(arguments, env=env, stdout=subprocess.DEVNULL)
    outcome: Row = {}
    for label, process in running.items():
        try:
            process.wait(max(0.0, started + options.warm_up_s - time.monotonic()))
            outcome[label] = round(time.monotonic() - started, 1)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            outcome[label] = "stopped"
    return {"warm_up_s": outcome}


def header(options: argparse.Namespace) -> Row:
    found: Row = {"commit": source_commit(), "torch": torch.__version__, "python": platform.python_version()}
    found["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()
    for package in ("triton", "fla", "transformers"):
        try:
            found[package] = __import__(package).__version__
        except Exception as error:
            found[package] = f"missing: {error}"
    found["public_kernels"] = f"at most {options.public_configs} configurations each, evenly spaced over their lists"
    return found


def print_tables(rows: list[Row], models: list[str]) -> None:
    """A table for each kind: a line a size, a column a model."""
    for what in dict.fromkeys(row["what"] for row in rows):
        of_kind = [row for row in rows if row["what"] == what]
        unit = "ms (peak GiB)" if what == "decode" else "tok/s (peak GiB)"
        print(f"\n{what}, {unit}\n" + f"{'':>8}" + "".join(f"{name:>20}" for name in models))
        for size in dict.fromkeys(row["size"] for row in of_kind):
            cells = {row["model"]: _shown(row) for row in of_kind if row["size"] == size}
            print(f"{size:>8,}" + "".join(f"{cells.get(name, '-'):>20}" for name in models))


def _shown(row: Row) -> str:
    if "ms" not in row:
        return "failed" if "error" in row else "-"
    number = f"{row['ms']:.2f}" if row["what"] == "decode" else f"{row['tok_per_s']:,}"
    return number + (f" ({row['peak_gib']:.1f})" if "peak_gib" in row else "")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(SUBJECTS), metavar="MODEL", help=", ".join(SUBJECTS))
    parser.add_argument("--kinds", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--cell-s", type=float, default=0.7, help="time to repeat a cell for, compilation apart")
    parser.add_argument("--budget-s", type=float, default=350.0, help="no cell is begun after that, warm-up included")
    parser.add_argument("--warm-up-s", type=float, default=150.0)
    parser.add_argument("--public-configs", type=int, default=2)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--compile-only", action="store_true", help="run every cell once")
    options = parser.parse_args()
    options.models = options.models or list(OWN if options.tiny else SUBJECTS)
    return options


def main() -> None:
    options = parse_options()
    if torch.cuda.is_available():
        keep_few_configurations(options.public_configs)
    elif options.tiny:
        torch.set_num_threads(1)
    else:
        sys.exit("benchmarks.gpu_models needs a GPU; --tiny runs anywhere")
    run, rows = Run(options), []
    if options.warm_up_s > 0 and not options.tiny:
        print(json.dumps(warm_up(options)), flush=True)
        os.environ["TRITON_CACHE_AUTOTUNING"] = "1"
    if not options.compile_only:
        print(json.dumps(header(options)), flush=True)
    for row in run.all():
        rows.append(row)
        shown = {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}
        print(json.dumps(shown), flush=True)
    print_tables(rows, options.models)


if __name__ == "__main__":
    main()
