"""The executor for a GPU, checked and measured: `python -m benchmarks.gpu_decode`. One line of JSON a result.

First the checks of `benchmarks/gpu_decode_checks.py`, then, in the order of importance and until the time is over:

- a step at several batch sizes: hidden vectors, logits and greedy choice in one graph, beside its floor. The floor is
  the matrices once, and what the states must move (slots and tails read and written, rings read), over the rate of a
  large copy on this device;
- what the parts of a step take, and the same products through the vendor's library: what batch invariance costs;
- the eager step; a prompt of a million tokens in chunks, with the peak of memory; the engine around it all.

A part that fails says so and the next one begins. `--tiny` runs everything that can in a small size without a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernels are imported

from benchmarks import gpu_decode_checks as checks
from nsm_core.config import EngineConfig, ModelConfig
from nsm_core.execution.cuda.decode import DecodeStep
from nsm_core.execution.cuda.executor import CudaExecutor
from nsm_core.execution.cuda.kernels.linear import Linear, run_linear
from nsm_core.execution.cuda.options import CudaOptions, CudaWeights
from nsm_core.execution.cuda.weights import SlotLayer, pack_weights
from nsm_core.execution.eager import EagerExecutor
from nsm_core.model.bundled import BUNDLED
from nsm_core.model.nsm import NsmModel
from nsm_core.sampling.kernel import choose_tokens
from nsm_core.state.pool import StatePool
from nsm_core.state.spec import POSITION

BATCHES = (512, 1, 256, 64, 8, 128, 32)
TINY = {"d_model": 64, "num_layers": 4, "num_heads": 2, "num_kv_heads": 1, "num_memory_slots": 16, "write_top_k": 16}
TINY |= {"mlp_hidden": 96, "vocab_size": 128, "window": 70}
REPEATS = 30

Row = dict[str, Any]


def load_model(is_tiny: bool, device: torch.device) -> NsmModel:
    """The bundled model; random weights of its shape where its files cannot be read."""
    config = ModelConfig.load(BUNDLED / "config.json")
    if not is_tiny:
        try:
            from nsm_core.model.storage import read_model

            return read_model(BUNDLED)[0].to(device)
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
        from nsm_core.evaluation.provenance import source_commit
    except ImportError:  # it knows the versions of packages that are not needed here
        return None
    return source_commit()


def say(part: str, row: Row) -> None:
    shown = {key: float(f"{value:.5g}") if isinstance(value, float) else value for key, value in row.items()}
    print(json.dumps({"part": part} | shown), flush=True)


def record(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """The launches of `work`, which runs twice before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    return graph


def median_ms(work: Callable[[], object], repeats: int = REPEATS) -> Row:
    """Device time of one call: median, fastest and slowest, after three that are not counted."""
    times = []
    for repeat in range(repeats + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        if repeat >= 3:
            times.append(start.elapsed_time(end))
    return {"ms": statistics.median(times), "ms_min": min(times), "ms_max": max(times)}


class Bench:
    """One model, its packed weights, and a pool of random states of long texts."""

    def __init__(self, model: NsmModel, num_rows: int) -> None:
        self.model, self.device = model, model.embedding.weight.device
        self.weights = pack_weights(model, torch.bfloat16)
        self.pool = StatePool(model.state_spec, num_rows, self.device)
        self.step = DecodeStep(self.weights, model.config, self.pool.tensors, num_rows)
        self.logits = torch.empty(num_rows, model.config.vocab_size, device=self.device)
        for name, value in self.pool.tensors.items():
            if name == POSITION:
                value.random_(5000, 1_000_000)
            else:
                value.normal_(std=0.5)
        self.copy_rate = 0.0

    def whole_step(self, batch: int) -> None:
        self.step.run(batch)
        run_linear(self.weights.output, self.step.buffers.hidden[:batch], self.logits[:batch])
        choose_tokens(self.logits[:batch], None)

    def give_inputs(self, batch: int) -> None:
        """Distinct rows out of order, random tokens."""
        rows = torch.randperm(self.pool.num_rows, device=self.device)[:batch]
        ids = torch.randint(self.model.config.vocab_size, (batch,), device=self.device)
        self.step.inputs(batch).fill_(-1)
        self.step.inputs(batch)[:, :batch].copy_(torch.stack((rows, ids)))

    def floor_bytes(self, batch: int) -> int:
        """What a step must move: all matrices once, and the states of its rows."""
        states = 0
        for tensor in self.model.state_spec.tensors:
            is_ring = tensor.name.endswith("kv")  # read as a whole; one place in it is written
            states += tensor.num_bytes * (1 if is_ring else 2)
        return self.weights.num_bytes + batch * states


def copy_rate(bench: Bench) -> Iterator[Row]:
    source = torch.randn(2**28, device=bench.device)
    target = torch.empty_like(source)
    measured = median_ms(lambda: target.copy_(source), 10)
    bench.copy_rate = 2 * 4 * 2**28 / (1e-3 * measured["ms"])
    yield {"copy_tb_per_s": bench.copy_rate / 1e12}


@torch.inference_mode()
def step_times(bench: Bench) -> Iterator[Row]:
    for batch in BATCHES:
        bench.give_inputs(batch)
        graph = record(functools.partial(bench.whole_step, batch))
        without_logits = record(functools.partial(bench.step.run, batch))
        measured = median_ms(graph.replay)
        floor_ms = 1e3 * bench.floor_bytes(batch) / bench.copy_rate
        yield (
            {"batch": batch}
            | measured
            | {
                "tokens_per_s": round(1e3 * batch / measured["ms"]),
                "floor_ms": floor_ms,
                "share_of_floor": floor_ms / measured["ms"],
                "ms_without_logits": median_ms(without_logits.replay)["ms"],
            }
        )


@torch.inference_mode()
def part_times(bench: Bench) -> Iterator[Row]:
    """Each kind of launch, for all layers of the model, in a graph of its own."""
    for batch in (512, 1, 64):
        bench.give_inputs(batch)
        row: Row = {"batch": batch}
        for name, work in _parts(bench, batch).items():
            row[name] = median_ms(record(work).replay, 15)["ms"]
        yield row


def _parts(bench: Bench, batch: int) -> dict[str, Callable[[], object]]:
    step, buffers, layers = bench.step, bench.step.buffers, bench.weights.layers
    slot_layers = [(i, layer.mixer) for i, layer in enumerate(layers) if isinstance(layer.mixer, SlotLayer)]
    ring_layers = [(i, layer.mixer) for i, layer in enumerate(layers) if not isinstance(layer.mixer, SlotLayer)]
    x, operand = buffers.x[:batch], buffers.operand[:batch]

    def slots() -> None:
        for index, mixer in slot_layers:
            step.move_slots(mixer, f"layers.{index}.", batch)

    def rings() -> None:
        for index, mixer in ring_layers:
            step.read_ring(mixer, f"layers.{index}.", batch)

    def linears(chosen: list[Linear], given: torch.Tensor, to: torch.Tensor) -> None:
        for linear in chosen:
            run_linear(linear, given, to)

    return {
        "slots": slots,
        "rings": rings,
        "project": lambda: linears([layer.mixer.project for layer in layers], operand, buffers.projected[:batch]),
        "router": lambda: linears([mixer.router for _, mixer in slot_layers], x, buffers.router[:batch]),
        "out": lambda: linears([layer.out for layer in layers], buffers.mixed[:batch], buffers.hidden[:batch]),
        "up": lambda: linears([layer.up for layer in layers], operand, buffers.gated[:batch]),
        "down": lambda: linears([layer.down for layer in layers], buffers.gated[:batch], buffers.hidden[:batch]),
        "logits": lambda: run_linear(bench.weights.output, buffers.hidden[:batch], bench.logits[:batch]),
        "greedy": lambda: choose_tokens(bench.logits[:batch], None),
    }


@torch.inference_mode()
def library_products(bench: Bench) -> Iterator[Row]:
    """The bf16 products of a step alone, by the vendor's library: no norm, gate, residual or router."""
    linears = [bench.weights.output]
    for layer in bench.weights.layers:
        linears += [layer.mixer.project, layer.out, layer.up, layer.down]
    for batch in (512, 64, 1):
        inputs = {
            linear.weight.shape[1]: torch.randn(batch, linear.weight.shape[1], device=bench.device).bfloat16()
            for linear in linears
        }
        outputs = {
            linear.weight.shape[0]: torch.empty(batch, linear.weight.shape[0], device=bench.device).bfloat16()
            for linear in linears
        }

        def products(inputs: Any = inputs, outputs: Any = outputs) -> None:
            for linear in linears:
                num_outputs, depth = linear.weight.shape
                torch.mm(inputs[depth], linear.weight.T, out=outputs[num_outputs])

        yield {"batch": batch} | median_ms(record(products).replay, 15)


@torch.inference_mode()
def eager_steps(bench: Bench) -> Iterator[Row]:
    for batch in (1, 64, 512):
        eager = EagerExecutor(bench.model, num_rows=batch)
        for row in range(batch):
            eager.pool.lease(row)

        def step(eager: EagerExecutor = eager, batch: int = batch) -> None:
            eager.logits(eager.step(range(batch), [1] * batch)).argmax(dim=-1)

        with torch.autocast(bench.device.type, torch.bfloat16):
            measured = median_ms(step, 7)
        yield {"batch": batch, "tokens_per_s": round(1e3 * batch / measured["ms"])} | measured


def long_prompt(bench: Bench, num_tokens: int, chunk: int = 32768, limit_s: float = 25.0) -> Iterator[Row]:
    """One row reads a prompt chunk by chunk, as the engine gives it."""
    executor = CudaExecutor(bench.model, num_rows=1)
    executor.pool.lease(0)
    executor.pool.write(0, executor.initial)
    ids = torch.randint(1, bench.model.config.vocab_size, (num_tokens,)).tolist()
    executor.read((0,), (ids[:chunk],))  # compiles
    executor.pool.write(0, executor.initial)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    started, at = time.monotonic(), 0
    for start in range(0, num_tokens, chunk):
        executor.read((0,), (ids[start : start + chunk],))
        torch.cuda.synchronize()
        at, seconds = start + chunk, time.monotonic() - started
        if at in (131072, 524288) or at >= num_tokens or seconds > limit_s:
            peak = torch.cuda.max_memory_allocated() / 2**30
            yield {"tokens": at, "s": seconds, "tokens_per_s": round(at / seconds), "peak_gib": peak}
        if seconds > limit_s:
            return


def engine_steps(bench: Bench) -> Iterator[Row]:
    """Greedy requests through the whole engine: wall time a step, to be compared with the device's."""
    from nsm_core.engine.engine import Engine
    from nsm_core.engine.request import GenerationRequest
    from nsm_core.sampling.params import SamplingParams
    from nsm_core.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(BUNDLED)
    for batch, temperature in ((1, 0.0), (64, 0.0), (512, 0.0), (512, 1.0)):
        config = EngineConfig(max_slots=batch, token_budget=max(256, 2 * batch))
        engine = Engine(bench.model, tokenizer, fingerprint="", config=config, executor=CudaExecutor)
        for index in range(batch):
            wishes = SamplingParams(max_tokens=64, temperature=temperature, top_p=0.95, ignore_eos=True, seed=index)
            engine.add(GenerationRequest(request_id=str(index), prompt_ids=(1 + index,), sampling=wishes))
        for _ in range(8):
            engine.step()
        times = []
        while engine.has_work and len(times) < 50:
            started = time.perf_counter()
            engine.step()
            times.append(1e3 * (time.perf_counter() - started))
        ms = statistics.median(times)
        yield {"batch": batch, "temperature": temperature, "ms": ms, "tokens_per_s": round(1e3 * batch / ms)}


def all_checks(model: NsmModel, has_gpu: bool) -> dict[str, Callable[[], Iterator[Row]]]:
    fp32 = CudaOptions(weights=CudaWeights.FP32, graphs=False)
    if not has_gpu:
        return {
            "linear": lambda: checks.check_linears(model, torch.float32, (1, 70)),
            "block": lambda: checks.check_blocks(model),
            "step": lambda: checks.check_steps(model, fp32, num_steps=2, num_rows=3),
            "invariance": lambda: checks.check_invariance(model, fp32, (1, 3)),
            "sampler": lambda: checks.check_sampler(torch.randn(8, 200)),
        }
    bf16 = CudaOptions(weights=CudaWeights.BF16)
    fp16 = CudaOptions(weights=CudaWeights.FP16)
    return {
        "linear bf16": lambda: checks.check_linears(model, torch.bfloat16, (3, 200)),
        "block fp32": lambda: checks.check_blocks(model),
        "step fp32": lambda: checks.check_steps(model, fp32, num_steps=8, num_rows=5),
        "step bf16": lambda: checks.check_steps(model, bf16, num_steps=16, num_rows=24),
        "replays": lambda: checks.check_replays(model, CudaWeights.BF16),
        "invariance": lambda: checks.check_invariance(model, bf16, (*checks.BATCHES, 512)),
        "sampler": lambda: checks.check_sampler(3 * torch.randn(256, model.config.vocab_size, device="cuda")),
        "step fp16": lambda: checks.check_steps(model, fp16, num_steps=16, num_rows=24),
    }


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
    say(name, {"part_s": round(time.monotonic() - started, 2)})
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-s", type=float, default=240.0, help="no part is begun after that")
    parser.add_argument("--parts", default="", help="only the parts whose names contain one of these, comma-separated")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    if not (has_gpu or options.tiny):
        sys.exit("benchmarks.gpu_decode needs a GPU; --tiny runs its checks anywhere")
    deadline = time.monotonic() + options.budget_s
    device = torch.device("cuda" if has_gpu else "cpu")
    name = torch.cuda.get_device_name() if has_gpu else platform.processor()
    say("header", {"commit": commit(), "torch": torch.__version__, "device": name})
    model = load_model(options.tiny, device)
    torch.manual_seed(0)
    parts = all_checks(model, has_gpu)
    if has_gpu:
        bench = Bench(model, 512)
        parts |= {
            "copy": lambda: copy_rate(bench),
            "step times": lambda: step_times(bench),
            "parts": lambda: part_times(bench),
            "library products": lambda: library_products(bench),
            "long prompt": lambda: long_prompt(bench, 2**20),
            "eager": lambda: eager_steps(bench),
            "engine": lambda: engine_steps(bench),
        }
    wanted = [part for part in options.parts.split(",") if part]
    chosen = {part: work for part, work in parts.items() if not wanted or any(word in part for word in wanted)}
    results = [run_part(part, work, deadline) for part, work in chosen.items()]
    say("end", {"ok": all(results)})
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
