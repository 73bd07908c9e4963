"""The slot scan's kernels on a GPU: `python -m benchmarks.kernels`. Checks, then times; tables, then one line of JSON.

Checks compare outputs, states and every gradient with the chunked form in fp64, by norm. Times are medians of CUDA
events, at the sizes of training (32 rows of 1,024 tokens) and of prefill (one row of 2K to 131K), beside the chunked
form, eager and compiled. Each kernel's time stands beside the time that its bytes need at the bandwidth of a copy, and
that its products need at the rate of a large bf16 product. A part that fails prints its traceback; the rest goes on.

Needs torch, triton and numpy only. `--tiny` runs a small size on a CPU in the interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from nsm_core.ops.slot_scan.chunked import LOG_DECAY_MIN, slot_scan_chunked
from nsm_core.ops.slot_scan.inputs import ScanInputs
from nsm_core.ops.slot_scan.operator import fits_shared_memory, slot_scan_kernel

Scan = Callable[..., tuple[Tensor, Tensor]]
Inputs = dict[str, Tensor]

HEADS, SLOTS, HEAD_DIM = 8, 64, 64  # the base model's
TOLERANCE = {torch.float32: (1e-5, 1e-4), torch.bfloat16: (1e-2, 3e-2)}  # output and state, gradients
PREFILL_TOKENS = (2048, 8192, 32768, 131072)
COMPILED_TOKENS = 8192  # longer rows unroll hundreds of chunks: the compiler takes minutes


def make_inputs(rows: int, tokens: int, *, heads: int, slots: int, head_dim: int, device: str, **kind: Any) -> Inputs:
    """fp32 inputs as a layer makes them: normed queries and keys, a few slots written strongly."""
    shape = (rows, tokens, heads)
    q, k, v = torch.randn(3, *shape, head_dim, device=device).unbind(0)
    q, k = (x / x.square().mean(-1, keepdim=True).sqrt() for x in (q, k))
    log_decay = LOG_DECAY_MIN * torch.rand(*shape, slots, device=device) ** 12
    if kind.get("dense"):
        log_decay = -torch.nn.functional.softplus(torch.randn(*shape, slots, device=device) - 4.0)
    if kind.get("worst"):
        log_decay = torch.full_like(log_decay, LOG_DECAY_MIN)
    sequences = kind.get("lengths")
    num_states = len(sequences) if sequences else rows
    inputs = {
        "q": q,
        "k": k,
        "v": v,
        "log_decay": log_decay,
        "scale": (0.5 + torch.rand(heads, device=device)) * 2 * head_dim**-0.5,
        "state": torch.randn(num_states, heads, slots, 2 * head_dim, device=device),
    }
    if sequences:
        inputs["cu_seqlens"] = torch.tensor([0, *sequences], device=device).cumsum(0)
    if kind.get("reset"):
        inputs["reset"] = torch.rand(rows, tokens // 64, device=device) < 0.3
        inputs["initial"] = torch.randn(heads, slots, 2 * head_dim, device=device)
    if kind.get("bias"):
        inputs["read_bias"] = torch.randn(*shape, slots, device=device)
    if kind.get("active"):
        inputs["active"] = torch.rand(num_states, heads, slots, device=device) < 0.7
        inputs["active"][..., 0] = True
    return inputs


def cast(inputs: Inputs, dtype: torch.dtype, *, only: tuple[str, ...] = ()) -> Inputs:
    """Floating-point inputs (or only those named) in another dtype."""
    return {
        name: x.to(dtype) if x.is_floating_point() and (not only or name in only) else x for name, x in inputs.items()
    }


def results(scan: Scan, inputs: Inputs, d_out: Tensor, d_state: Tensor) -> Inputs:
    """Output, final state and gradients by name."""
    leaves = {name: x.detach().clone().requires_grad_(x.is_floating_point()) for name, x in inputs.items()}
    out, state = scan(ScanInputs(**leaves))
    wanted = [name for name, x in leaves.items() if x.requires_grad]
    outputs, tangents = (out, state), (d_out.to(out.dtype), d_state.to(state.dtype))
    gradients = torch.autograd.grad(outputs, [leaves[name] for name in wanted], tangents)
    named = {f"d_{name}": gradient for name, gradient in zip(wanted, gradients, strict=True)}
    return {"out": out.detach(), "final state": state.detach(), **named}


CHECKS: dict[str, dict[str, Any]] = {
    "training": {"rows": 2, "tokens": 1024},
    "ends inside a chunk": {"rows": 3, "tokens": 333},
    "one token": {"rows": 2, "tokens": 1},
    "steepest decay": {"rows": 2, "tokens": 256, "worst": True},
    "all slots written": {"rows": 2, "tokens": 1024, "dense": True},
    "resets": {"rows": 4, "tokens": 512, "reset": True},
    "bias and active slots": {"rows": 2, "tokens": 200, "bias": True, "active": True},
    "sequences": {"rows": 1, "tokens": 1000, "lengths": (1, 64, 65, 0, 357, 513), "active": True},
    "16 slots": {"rows": 2, "tokens": 200, "slots": 16, "head_dim": 32},
    "128 slots": {"rows": 1, "tokens": 300, "slots": 128},
    "head of 128": {"rows": 1, "tokens": 300, "head_dim": 128},
    "128 slots, head of 128": {"rows": 1, "tokens": 300, "slots": 128, "head_dim": 128},
    "32 slots, head of 32": {"rows": 2, "tokens": 300, "slots": 32, "head_dim": 32, "reset": False},
}


def is_possible(name: str, dtype: str) -> bool:
    """Whether the kernels take the case at all."""
    slots, head_dim = CHECKS[name].get("slots", SLOTS), CHECKS[name].get("head_dim", HEAD_DIM)
    return fits_shared_memory(slots=slots, head_dim=head_dim, dtype=getattr(torch, dtype))


def check(case: dict[str, Any], dtype: torch.dtype, device: str) -> dict[str, float]:
    """Relative error of every tensor: |got - want| / |want|, against fp64 on the same (rounded) inputs.

    Where the exact gradient all but vanishes (steepest decay: every slot holds the same) the error is seen relative to
    a tenth of the largest gradient: what cancels there had been rounded.
    """
    torch.manual_seed(0)
    shape = {"heads": HEADS, "slots": SLOTS, "head_dim": HEAD_DIM}
    inputs = cast(make_inputs(**{**shape, **case}, device=device), dtype, only=("q", "k", "v"))
    d_out, d_state = torch.randn_like(inputs["q"]), torch.randn_like(inputs["state"])
    want = results(slot_scan_chunked, cast(inputs, torch.float64), d_out, d_state)
    got = results(slot_scan_kernel, inputs, d_out, d_state)
    floor = (1e-1 if dtype == torch.bfloat16 else 1e-2) * float(
        max(want[name].norm() for name in ("d_q", "d_k", "d_v"))
    )
    errors = {}
    for name, tensor in want.items():
        size = tensor.norm().clamp(min=floor if name.startswith("d_") else 1e-30)
        errors[name] = float((got[name].double() - tensor).norm() / size)
    return errors


def run_checks(
    device: str, dtypes: tuple[torch.dtype, ...], cases: dict[str, dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    for dtype in dtypes:
        value_limit, gradient_limit = TOLERANCE[dtype]
        for name, case in cases.items():
            label = f"{name} {str(dtype).removeprefix('torch.')}"
            started = time.monotonic()
            try:
                errors = check(case, dtype, device)
            except Exception:
                print(f"check {label}: FAILED {case}\n{traceback.format_exc()}", flush=True)
                yield {"check": label, "ok": False}
                continue
            wrong = [
                tensor
                for tensor, error in errors.items()
                if not error < (gradient_limit if tensor.startswith("d_") else value_limit)
            ]
            figures = "  ".join(f"{tensor} {error:.1e}" for tensor, error in errors.items())
            verdict = f"WRONG {wrong}" if wrong else "ok"
            print(f"check {label}: {verdict} ({time.monotonic() - started:.1f} s)  {figures}", flush=True)
            yield {"check": label, "ok": not wrong, "errors": errors}


def median_ms(work: Callable[[], object], *, repeats: int = 20) -> float:
    """Device time of one call; the first calls compile and warm up."""
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def ceilings() -> tuple[float, float]:
    """Bytes/s of a large copy (read and written) and FLOP/s of a large bf16 product, on random data."""
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / median_ms(lambda: target.copy_(source)) * 1e3
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16).unbind(0)
    return copy, 2 * 8192**3 / median_ms(lambda: a @ b) * 1e3


def timing_subjects(rows: int, tokens: int) -> dict[str, Scan]:
    subjects: dict[str, Scan] = {"kernels": slot_scan_kernel, "chunked": slot_scan_chunked}
    if tokens <= COMPILED_TOKENS:
        subjects["chunked, compiled"] = torch.compile(slot_scan_chunked, fullgraph=True, dynamic=False)
    return subjects


def measure(scan: Scan, inputs: Inputs, *, backward: bool) -> dict[str, float]:
    leaves = {name: x.detach().clone().requires_grad_(backward and x.is_floating_point()) for name, x in inputs.items()}
    wanted = [x for x in leaves.values() if x.requires_grad]

    def work() -> None:
        with torch.autocast("cuda", torch.bfloat16), torch.set_grad_enabled(backward):
            out, _ = scan(ScanInputs(**leaves))
        if backward:
            torch.autograd.grad(out, wanted, torch.ones_like(out), allow_unused=True)

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    milliseconds = median_ms(work)
    return {"ms": milliseconds, "peak_gib": (torch.cuda.max_memory_allocated() - before) / 2**30}


def run_timings(shapes: list[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    for rows, tokens in shapes:
        made = make_inputs(rows, tokens, heads=HEADS, slots=SLOTS, head_dim=HEAD_DIM, device="cuda")
        inputs = cast(made, torch.bfloat16, only=("q", "k", "v"))
        for name, scan in timing_subjects(rows, tokens).items():
            for backward in (False, True) if rows > 1 else (False,):
                what = "forward and backward" if backward else "forward"
                row: dict[str, Any] = {"subject": name, "rows": rows, "tokens": tokens, "what": what}
                try:
                    row |= measure(scan, inputs, backward=backward)
                except Exception:
                    print(f"time {row}: FAILED\n{traceback.format_exc()}", flush=True)
                    torch.cuda.empty_cache()
                    continue
                rate = rows * tokens / row["ms"] / 1e3
                print(
                    f"time {name:18s} {rows:3d} x {tokens:6d} {what:21s} {row['ms']:9.3f} ms {rate:8.2f} M tokens/s "
                    f"{row['peak_gib']:6.2f} GiB",
                    flush=True,
                )
                yield row


def kernel_costs(rows: int, tokens: int, *, size: int = 2) -> dict[str, tuple[float, float]]:
    """Bytes and FLOPs of each kernel, from its loads, stores and products; `size` bytes an element of q, k and v."""
    pairs, chunks = rows * tokens * HEADS, rows * -(-tokens // 64) * HEADS
    vector, slots, state = pairs * HEAD_DIM * size, pairs * SLOTS * 4, chunks * SLOTS * 2 * HEAD_DIM * 4
    weights = pairs * SLOTS * size
    square = pairs * 2 * 64  # times the two other dimensions' one: a product with a 64-token side
    bank, inner = 2 * pairs * SLOTS * HEAD_DIM, square * HEAD_DIM
    mixed = square * SLOTS
    return {
        "chunk_update_kernel": (2 * vector + slots + state, 2 * bank),
        "chunk_scan_kernel": (2 * state, 0),
        "chunk_read_kernel": (4 * vector + slots + state, 2 * bank + 2 * inner + 4 * mixed),
        "chunk_read_backward_kernel": (
            4 * vector + 2 * slots + 2 * weights + 2 * state,
            4 * bank + 2 * inner + 4 * mixed,
        ),
        "chunk_scan_backward_kernel": (2 * state, 0),
        "chunk_bank_backward_kernel": (  # both banks
            7 * vector + 6 * slots + 2 * weights + 2 * state,
            5 * bank + 5 * inner + 8 * mixed,
        ),
    }


def profile_kernels(rows: int, tokens: int, copy: float, product: float) -> list[dict[str, Any]]:
    """Time of each kernel in one forward and backward pass beside what its bytes and its products need at least."""
    inputs = make_inputs(rows, tokens, heads=HEADS, slots=SLOTS, head_dim=HEAD_DIM, device="cuda")
    leaves = {name: x.requires_grad_() for name, x in cast(inputs, torch.bfloat16, only=("q", "k", "v")).items()}
    repeats = 5

    def work() -> None:
        out, _ = slot_scan_kernel(ScanInputs(**leaves))
        torch.autograd.grad(out, list(leaves.values()), torch.ones_like(out))

    work()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            work()
        torch.cuda.synchronize()
    costs, table = kernel_costs(rows, tokens), []
    for event in sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total):
        milliseconds = event.self_device_time_total / repeats / 1e3
        num_bytes, flops = costs.get(event.key, (0.0, 0.0))
        row = {
            "kernel": event.key[:60],
            "rows": rows,
            "tokens": tokens,
            "ms": milliseconds,
            "bytes_ms": num_bytes / copy * 1e3,
            "flops_ms": flops / product * 1e3,
        }
        table.append(row)
        print(
            f"kernel {row['kernel']:60s} {milliseconds:8.3f} ms   bytes alone {row['bytes_ms']:7.3f} ms   "
            f"products alone {row['flops_ms']:7.3f} ms",
            flush=True,
        )
    return table


def run_checks_apart(jobs: int) -> list[dict[str, Any]]:
    """Every check in a process of its own: a kernel that reads where it must not takes only its own check down."""

    def one(label: tuple[str, str]) -> dict[str, Any]:
        command = [sys.executable, "-m", "benchmarks.kernels", "--check", *label]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = done.stdout.splitlines() or [f"check {' '.join(label)}: FAILED\n{done.stderr[-2000:]}"]
        print("\n".join(line for line in lines if not line.startswith("{")), flush=True)
        name = f"{label[0]} {label[1]}"
        return json.loads(lines[-1]) if lines[-1].startswith("{") else {"check": name, "ok": False}

    with ThreadPoolExecutor(jobs) as pool:
        labels = [(name, dtype) for dtype in ("bfloat16", "float32") for name in CHECKS if is_possible(name, dtype)]
        return list(pool.map(one, labels))


def run_gpu(arguments: argparse.Namespace) -> dict[str, Any]:
    torch.backends.cuda.matmul.allow_tf32 = False
    report: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    report["checks"] = run_checks_apart(arguments.jobs) if not arguments.times_only else []
    if arguments.checks_only:
        return report
    copy, product = ceilings()
    print(f"copy {copy / 1e12:.2f} TB/s, bf16 product {product / 1e12:.0f} TFLOP/s", flush=True)
    report |= {"copy_bytes_per_s": copy, "product_flop_per_s": product, "kernels": [], "times": []}
    for rows, tokens in ((32, 1024), (1, 32768)):
        try:
            report["kernels"] += profile_kernels(rows, tokens, copy, product)
        except Exception:
            print(f"profile {rows} x {tokens}: FAILED\n{traceback.format_exc()}", flush=True)
    report["times"] = list(run_timings([(32, 1024), *((1, tokens) for tokens in PREFILL_TOKENS)]))
    return report


def run_tiny() -> dict[str, Any]:
    """Shows that the benchmark works where there is no GPU, and measures nothing."""
    shape = {"heads": 1, "slots": 16, "head_dim": 32}
    cases = {name: {**CHECKS[name], **shape, "tokens": 128, "rows": 1} for name in ("training", "resets")}
    return {"device": "interpreter", "checks": list(run_checks("cpu", (torch.float32,), cases))}


def source_commit() -> str | None:
    try:
        from nsm_lab import provenance
    except ImportError:  # the packages that evaluation needs are not on every machine with a GPU
        return None
    return provenance.source_commit()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checks-only", action="store_true", help="no times")
    parser.add_argument("--times-only", action="store_true", help="no checks")
    parser.add_argument("--check", nargs=2, metavar=("NAME", "DTYPE"), help="one check, as one line of JSON")
    parser.add_argument("--jobs", type=int, default=8, help="checks at a time: most of their time is compilation")
    parser.add_argument("--tiny", action="store_true", help="a small size in the interpreter, on a CPU")
    arguments = parser.parse_args()
    if arguments.tiny and os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("--tiny needs TRITON_INTERPRET=1 in the environment")
    if arguments.check:
        name, dtype = arguments.check
        for row in run_checks("cuda", (getattr(torch, dtype),), {name: CHECKS[name]}):
            print(json.dumps(row))
        return
    report = {"commit": source_commit(), "torch": torch.__version__}
    report |= run_tiny() if arguments.tiny else run_gpu(arguments)
    print(json.dumps(report))
    sys.exit(0 if all(row["ok"] for row in report["checks"]) else 1)


if __name__ == "__main__":
    main()
