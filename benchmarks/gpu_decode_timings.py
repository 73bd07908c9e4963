"""What `benchmarks.gpu_decode` measures: steps, their parts, and what stands beside and around them."""

from __future__ import annotations

import functools
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.measured_model import MEASURED_MODEL
from nsm_core.config import EngineConfig
from nsm_core.execution.cuda.decode import DecodeStep
from nsm_core.execution.cuda.executor import CudaExecutor
from nsm_core.execution.cuda.kernels import attention, slots
from nsm_core.execution.cuda.kernels.linear import Linear, Stream, run_linear, tile_columns
from nsm_core.execution.cuda.options import CudaOptions, CudaWeights
from nsm_core.execution.cuda.weights import AttentionLayer, SlotLayer, pack_weights
from nsm_core.execution.eager import EagerExecutor
from nsm_core.model.nsm import NsmModel
from nsm_core.sampling.kernel import choose_tokens
from nsm_core.state.pool import StatePool
from nsm_core.state.spec import POSITION

BATCHES = (512, 1, 256, 64, 8, 128, 32)
REPEATS, IN_A_ROW = 30, 5

Row = dict[str, Any]


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


def median_ms(work: Callable[[], object], repeats: int = REPEATS, *, in_a_row: int = 1) -> Row:
    """Device time of one call: median, fastest and slowest, after three that are not counted.

    `in_a_row`: calls between two readings of the clock; from the second on, their launch hides behind the one before.
    """
    times = []
    for repeat in range(repeats + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(in_a_row):
            work()
        end.record()
        end.synchronize()
        if repeat >= 3:
            times.append(start.elapsed_time(end) / in_a_row)
    return {"ms": statistics.median(times), "ms_min": min(times), "ms_max": max(times)}


class Bench:
    """One model, its packed weights, and a pool of random states of long texts."""

    def __init__(self, model: NsmModel, num_rows: int) -> None:
        self.model, self.device = model, model.embedding.weight.device
        self.weights = pack_weights(model, torch.bfloat16)
        self.held_as = self.weights.rings(CudaWeights.BF16.ring_dtype)
        self.pool = StatePool(model.state_spec, num_rows, self.device, held_as=self.held_as)
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
        run_linear(self.weights.output, self.step.buffers(batch).hidden, self.logits[:batch])
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
        for name, tensor in self.pool.tensors.items():
            is_ring = name in self.held_as  # read as a whole; one place in it is written
            states += tensor[0].nbytes * (1 if is_ring else 2)
        return self.weights.num_bytes + batch * states


def copy_rate(bench: Bench) -> Iterator[Row]:
    source = torch.randn(2**28, device=bench.device)
    target = torch.empty_like(source)
    measured = median_ms(lambda: target.copy_(source), 10)
    bench.copy_rate = 2 * 4 * 2**28 / (1e-3 * measured["ms"])
    yield {"copy_tb_per_s": bench.copy_rate / 1e12}


@torch.inference_mode()
def step_times(bench: Bench) -> Iterator[Row]:
    if bench.copy_rate == 0.0:
        yield from copy_rate(bench)
    for batch in BATCHES:
        bench.give_inputs(batch)
        graph = record(functools.partial(bench.whole_step, batch))
        without_logits = record(functools.partial(bench.step.run, batch))
        measured = median_ms(graph.replay, in_a_row=IN_A_ROW) | {"ms_from_idle": median_ms(graph.replay)["ms"]}
        floor_ms = 1e3 * bench.floor_bytes(batch) / bench.copy_rate
        row = {"batch": batch} | measured
        row["tokens_per_s"] = round(1e3 * batch / measured["ms"])
        row |= {"floor_ms": floor_ms, "share_of_floor": floor_ms / measured["ms"]}
        row["ms_without_logits"] = median_ms(without_logits.replay, in_a_row=IN_A_ROW)["ms"]
        yield row


@torch.inference_mode()
def part_times(bench: Bench) -> Iterator[Row]:
    """Each kind of launch, for all layers of the model, in a graph of its own."""
    for batch in (512, 1, 64):
        bench.give_inputs(batch)
        row: Row = {"batch": batch}
        for name, work in _parts(bench, batch).items():
            row[name] = median_ms(record(work).replay, 15, in_a_row=IN_A_ROW)["ms"]
        yield row


def _parts(bench: Bench, batch: int) -> dict[str, Callable[[], object]]:
    step, on, layers = bench.step, bench.step.buffers(batch), bench.weights.layers
    slot_layers = [(i, layer.mixer) for i, layer in enumerate(layers) if isinstance(layer.mixer, SlotLayer)]
    ring_layers = [(i, layer.mixer) for i, layer in enumerate(layers) if isinstance(layer.mixer, AttentionLayer)]

    def move_slots() -> None:
        for index, mixer in slot_layers:
            step.move_slots(mixer, f"layers.{index}.", on)

    def read_rings() -> None:
        for index, mixer in ring_layers:
            step.read_ring(mixer, f"layers.{index}.", on)

    def linears(chosen: list[Linear], given: torch.Tensor | Stream, to: torch.Tensor | Stream) -> None:
        for linear in chosen:
            run_linear(linear, given, to)

    return {
        "slots": move_slots,
        "rings": read_rings,
        "project": lambda: linears([layer.mixer.project for layer in layers], on.x, on.projected),
        "router": lambda: linears([mixer.router for _, mixer in slot_layers], on.x, on.router),
        "out": lambda: linears([layer.out for layer in layers], on.mixed, on.x),
        "up": lambda: linears([layer.up for layer in layers], on.x, on.gated),
        "down": lambda: linears([layer.down for layer in layers], on.gated, on.x),
        "logits": lambda: run_linear(bench.weights.output, on.hidden, bench.logits[:batch]),
        "greedy": lambda: choose_tokens(bench.logits[:batch], None),
    }


@torch.inference_mode()
def variants(bench: Bench) -> Iterator[Row]:
    """Other shapes of programs, at the largest batch: warps of the kernels over states, columns of the products."""
    batch = 512
    bench.give_inputs(batch)
    for name, module in (("slots", slots), ("rings", attention)):
        chosen, row = module.NUM_WARPS, {"batch": batch, "what": name}
        for warps in (2, 4, 8):
            module.NUM_WARPS = warps
            row[f"{warps} warps"] = median_ms(record(_parts(bench, batch)[name]).replay, 15, in_a_row=IN_A_ROW)["ms"]
        module.NUM_WARPS = chosen
        yield row
    layer, on = bench.weights.layers[0], bench.step.buffers(batch)
    for name, linear, given, out in (
        ("project", layer.mixer.project, on.x, on.projected),
        ("up", layer.up, on.x, on.gated),
        ("down", layer.down, on.gated, on.x),
        ("logits", bench.weights.output, on.hidden, bench.logits[:batch]),
    ):
        row = {"batch": batch, "what": name, "chosen": tile_columns(linear, batch)}
        for columns in (32, 64, 128):

            def work(linear: Linear = linear, given: Any = given, out: Any = out, columns: int = columns) -> None:
                for _ in range(10):
                    run_linear(linear, given, out, columns=columns)

            row[f"10 of {columns} columns"] = median_ms(record(work).replay, 15)["ms"]
        yield row


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

        yield {"batch": batch} | median_ms(record(products).replay, 15, in_a_row=IN_A_ROW)


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
    gc.collect()  # graphs of executors that are gone
    torch.cuda.empty_cache()
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
    from nsm_core.tokenizer import BpeTokenizer

    tokenizer = BpeTokenizer.load(MEASURED_MODEL)
    for batch, temperature in ((1, 0.0), (64, 0.0), (512, 0.0), (512, 1.0)):
        config = EngineConfig(max_slots=batch, token_budget=max(256, 2 * batch))
        engine = Engine(bench.model, tokenizer, fingerprint="", config=config, executor=CudaExecutor)
        for index in range(batch):
            sampling = SamplingParams(max_tokens=64, temperature=temperature, top_p=0.95, ignore_eos=True, seed=index)
            engine.add(GenerationRequest(request_id=str(index), prompt_ids=(1 + index,), sampling=sampling))
        for _ in range(8):
            engine.step()
        times = []
        while engine.has_work and len(times) < 50:
            started = time.perf_counter()
            engine.step()
            times.append(1e3 * (time.perf_counter() - started))
        ms = statistics.median(times)
        yield {"batch": batch, "temperature": temperature, "ms": ms, "tokens_per_s": round(1e3 * batch / ms)}


def engine_arrivals(bench: Bench, *, num_slots: int = 256, num_requests: int = 1024) -> Iterator[Row]:
    """Requests that come and go: as many as the slots run, each new one reads its prompt beside the others' tokens."""
    from nsm_core.engine.engine import Engine
    from nsm_core.engine.request import GenerationRequest
    from nsm_core.sampling.params import SamplingParams
    from nsm_core.tokenizer import BpeTokenizer

    draw, config = random.Random(0), EngineConfig(max_slots=num_slots, token_budget=16384, queue_limit=num_requests)
    engine = Engine(
        bench.model, BpeTokenizer.load(MEASURED_MODEL), fingerprint="", config=config, executor=CudaExecutor
    )
    for phase in ("warm-up", "measured"):
        for index in range(num_requests):
            sampling = SamplingParams(max_tokens=draw.randint(64, 192), temperature=0.0, ignore_eos=True)
            prompt = tuple(draw.randrange(1, 8192) for _ in range(draw.randint(16, 256)))
            engine.add(GenerationRequest(request_id=f"{phase}-{index}", prompt_ids=prompt, sampling=sampling))
        before, started, times = engine.stats(), time.perf_counter(), []
        while engine.has_work:
            step_started = time.perf_counter()
            engine.step()
            times.append(1e3 * (time.perf_counter() - step_started))
        seconds, after = time.perf_counter() - started, engine.stats()
    tokens = after.tokens_generated - before.tokens_generated
    row: Row = {"slots": num_slots, "requests": num_requests, "steps": len(times), "s": seconds}
    row |= {"tokens_per_s": round(tokens / seconds), "step_ms": statistics.median(times)}
    yield row | {"step_ms_p99": statistics.quantiles(times, n=100)[98]}


def prompt_times(bench: Bench) -> Iterator[Row]:
    """A call that reads prompts, wall time: recorded, and with every kernel launched anew."""
    readers = {
        name: CudaExecutor(bench.model, num_rows=128, options=CudaOptions(graphs=graphs))
        for name, graphs in (("recorded_ms", True), ("launched_ms", False))
    }
    for executor in readers.values():
        for row in range(128):
            executor.pool.lease(row)
            executor.pool.write(row, executor.initial)
    for num_rows, length in ((1, 16), (1, 100), (1, 500), (1, 2000), (1, 32768), (16, 100), (16, 500), (128, 100)):
        texts = [[5] * length] * num_rows
        row: Row = {"rows": num_rows, "tokens": length}
        for name, executor in readers.items():
            row[name] = _wall_ms(functools.partial(executor.read, range(num_rows), texts))
        yield row


def _wall_ms(work: Callable[[], object], repeats: int = 9) -> float:
    times = []
    for repeat in range(repeats + 2):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        if repeat >= 2:
            times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)
