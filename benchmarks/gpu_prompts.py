"""What a step with a prompt costs an engine on a GPU: `python -m benchmarks.gpu_prompts`. Tables, then a line of JSON.

Four parts, each in some seconds once the kernels are compiled:

- device: a launch of each recorded size of prompts, and of decode steps: time of the device, and of the host.
- steps: ROWS requests decode, prompts come, nothing else runs. Wall and CPU time of each stage of the engine's thread,
  by what the call of `step` launched: a prompt, what comes behind it, or plain tokens; "waits": with few rows a step is
  waited for at once. "span": the device's time from the step's first launch to its last. "busy": another thread holds
  the interpreter for that share of each millisecond, as the event loop does in a server.
- beside: the same engine in its thread, as `nsm serve` with workers has it: CONNECTIONS gateways of another process
  submit the requests and read the tokens. Stages again, and the gaps that the gateways see. What the wall time has
  beyond the CPU time is waiting: for the device in "wait", elsewhere for the interpreter lock, which the loop has.
- calls: of one step with a prompt, the calls of torch and of the driver, and the kernels' time (torch.profiler).

Without a GPU nothing is computed (`benchmarks/no_device.py`): graphs take a time that is given, `--device-ms`, and the
figures are of Python around them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import math
import multiprocessing
import os
import random
import socket
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernels are imported

from benchmarks.about import about_this_run
from benchmarks.gpu_decode import TINY
from nsm_core.config import EngineConfig
from nsm_core.engine.async_engine import AsyncEngine
from nsm_core.engine.engine import Engine
from nsm_core.engine.overlap import InFlightStep
from nsm_core.engine.request import GenerationRequest
from nsm_core.engine.stream_pace import MAX_INTERVAL_S, StreamPace
from nsm_core.execution.cuda.executor import CudaExecutor
from nsm_core.execution.cuda.options import CudaOptions
from nsm_core.execution.cuda.prompt_reader import _given, _sizes
from nsm_core.model.bundled import CHECKPOINTS
from nsm_core.sampling.params import SamplingParams

HAS_GPU = torch.cuda.is_available()
MODEL = CHECKPOINTS / "pulse-books-keyed"
PROMPT_EVERY = 4  # steps
SWITCH_S = 0.0005  # as in service/worker_process.py
REPEATS = 20
GATEWAYS_S = 120.0
NUM_SHOWN = 12  # gaps, from the 99th percentile on
MOST_TOKENS = 10**6  # of rows that never end

Row = dict[str, Any]


@dataclasses.dataclass(slots=True)
class Step:
    """One call of `Engine.step`: what it launched, and its stages' wall and CPU milliseconds. `events`: before and
    after its launches. `ended_at`: seconds, by the clock that all processes share.
    """

    kind: str = "nothing"
    stages: dict[str, list[float]] = dataclasses.field(default_factory=lambda: defaultdict(lambda: [0.0, 0.0]))
    events: tuple[Any, Any] | None = None
    ended_at: float = 0.0


class Timeline:
    """The stages of an engine's steps, by timers around the methods that make them. Stages do not lie in each other."""

    def __init__(self, engine: Engine, executor: CudaExecutor) -> None:
        self.steps: list[Step] = []
        self._step, self._was_prompt = Step(), False
        runner, overlap = engine._runner, executor.overlap
        stages: list[tuple[Any, str, str]] = [
            (engine, "_plan", "plan"),
            (engine, "_start_admitted", "admit"),
            (overlap, "step", "decode"),
            (overlap, "decode", "rounds"),
            (executor, "read", "prompts"),
            (executor, "logits", "logits"),
            (runner._sampler, "launch", "choose"),
            (engine._applier, "apply_in_flight", "apply"),
        ]
        self._undo: list[Callable[[], None]] = []
        for owner, method, name in stages:
            self._replace(owner, method, self._timed(getattr(owner, method), name))
        self._replace(InFlightStep, "wait", self._timed(InFlightStep.wait, "wait"))
        self._replace(engine, "step", self._whole(engine.step))
        for method, kind in (("launch", "prompt"), ("launch_rounds", "rounds"), ("run", "waits")):
            self._replace(runner, method, self._launching(getattr(runner, method), kind))

    def close(self) -> None:
        for undo in reversed(self._undo):
            undo()

    def _replace(self, owner: Any, method: str, new: Callable[..., Any]) -> None:
        old, is_own = getattr(owner, method), method in vars(owner)
        setattr(owner, method, new)
        self._undo.append(lambda: setattr(owner, method, old) if is_own else delattr(owner, method))

    def _timed(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return method(*args, **options)
            finally:
                stage = self._step.stages[name]
                stage[0] += 1e3 * (time.perf_counter() - wall)
                stage[1] += 1e3 * (time.thread_time() - cpu)

        return timed

    def _whole(self, method: Callable[..., Any]) -> Callable[..., Any]:
        timed = self._timed(method, "whole")

        def whole(*args: Any, **options: Any) -> Any:
            self._step = step = Step()
            try:
                return timed(*args, **options)
            finally:
                if self._was_prompt and step.kind != "prompt":
                    step.kind = "behind"
                self._was_prompt = step.kind == "prompt"
                step.ended_at = time.perf_counter()
                self.steps.append(step)

        return whole

    def _launching(self, method: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def launching(plan: Any, *args: Any) -> Any:
            self._step.kind = kind if kind != "prompt" or plan.prefill else "single"
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2)) if HAS_GPU else (None, None)
            if before is not None:
                before.record()
            launched = method(plan, *args)
            if after is not None:
                after.record()
                self._step.events = before, after
            return launched

        return launching

    def between(self, start: float, end: float) -> str:
        """What the steps launched that ended then, with their milliseconds."""
        steps = (step for step in self.steps if start < step.ended_at <= end)
        return " ".join(f"{step.kind} {step.stages['whole'][0]:.1f}" for step in steps) or "no step"

    def figures(self) -> dict[str, Row]:
        """By kind of step: milliseconds of each stage, wall p50, CPU p50 and wall p99."""
        if HAS_GPU:
            torch.cuda.synchronize()
        kinds: defaultdict[str, list[Step]] = defaultdict(list)
        for step in self.steps:
            kinds[step.kind].append(step)
        return {kind: _figures(steps) for kind, steps in kinds.items() if kind != "nothing"}


def _figures(steps: Sequence[Step]) -> Row:
    names = dict.fromkeys(name for step in steps for name in step.stages)
    stages = {}
    for name in names:
        wall, cpu = np.array([step.stages.get(name, [0.0, 0.0]) for step in steps]).T
        stages[name] = [round(float(value), 3) for value in (*np.percentile(wall, (50, 99)), np.median(cpu))]
    spans = [before.elapsed_time(after) for before, after in (step.events for step in steps if step.events)]
    span = [round(float(value), 3) for value in np.percentile(spans, (50, 99))] if spans else None
    return {"number": len(steps), "stages": stages, "span": span}


@dataclasses.dataclass(frozen=True, slots=True)
class Subject:
    """An engine as a server has it, and its parts."""

    engine: Engine
    executor: CudaExecutor
    info: Any
    tokenizer: Any
    vocab_size: int


def make_subject(model: Path, max_slots: int, *, is_tiny: bool) -> Subject:
    """All sizes recorded. Without a GPU the layers are small: nothing is computed with them."""
    from nsm_core.model.loader import load_checkpoint

    loaded, made = load_checkpoint(model, "cuda:0" if HAS_GPU else "cpu"), list[CudaExecutor]()
    served = _tiny(loaded.model.config) if is_tiny else loaded.model
    budget = max(max_slots, 16384 if HAS_GPU else 2048)

    def make(model: Any, *, num_rows: int, poison: bool) -> Any:
        made.append(_prepared(loaded, model, num_rows))
        return made[0]

    config = EngineConfig(max_slots=max_slots, token_budget=budget, queue_limit=4096, prompt_tokens_beside=1024)
    watchers = _watchers(loaded)
    engine = Engine(served, loaded.tokenizer, fingerprint="benchmark", config=config, executor=make, **watchers)
    while made[0].prepare_more():
        pass
    if made[0].overlap is not None and made[0].overlap.rounds is not None:
        made[0].overlap.rounds.record_all()
    return Subject(engine, made[0], loaded.info, loaded.tokenizer, served.config.vocab_size)


def _prepared(loaded: Any, model: Any, num_rows: int) -> Any:
    if HAS_GPU:  # compiled by several processes, and checked
        from nsm_core.execution.choose import choose_executor

        return choose_executor(loaded, "cuda").factory(model, num_rows=num_rows, poison=False)
    from benchmarks.no_device import fill_rounds

    executor = CudaExecutor(model, num_rows=num_rows, options=CudaOptions())
    fill_rounds(executor)
    return executor


def _tiny(config: Any) -> Any:
    from nsm_core.model.nsm import NsmModel

    return NsmModel(dataclasses.replace(config, **TINY)).eval().requires_grad_(False)


def _watchers(loaded: Any) -> dict[str, Any]:
    """What a server's engine has beside its model."""
    if not HAS_GPU:
        return {}
    from nsm_core.engine.step_stats import meter_of
    from nsm_core.model.observer import observer_of

    return {"meter": meter_of(loaded.device), "observer": observer_of(loaded.model)}


@torch.inference_mode()
def device_times(subject: Subject) -> list[Row]:
    """Milliseconds of the device, and of the host's call, for a recorded launch; nothing else runs."""
    reader, executor = subject.executor._prompts, subject.executor
    rows, launched = [], list[tuple[str, Callable[[], object]]]()
    for num_rows, length in sorted(_sizes(reader._rows)):
        size, of_rows = (num_rows, length), list(range(num_rows))
        ids = [[1] * length] * num_rows
        batch = reader._batch(size)
        if batch.graph is not None and num_rows * length <= 4096:
            batch.inputs.given.copy_(torch.from_numpy(_given(size, of_rows, ids)))
            launched.append((f"prompt {num_rows} x {length}", batch.graph.replay))
    for bucket in executor.buckets:
        executor.inputs_of(bucket).fill_(-1)
        launched.append((f"step of {bucket} (no row)", executor._graphs[bucket].replay))
    for name, launch in launched:
        launch()
        torch.cuda.synchronize()
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        started = time.perf_counter()
        for _ in range(REPEATS):
            launch()
        host = 1e3 * (time.perf_counter() - started) / REPEATS
        after.record()
        torch.cuda.synchronize()
        rows.append({"launch": name, "device_ms": before.elapsed_time(after) / REPEATS, "host_ms": host})
        print(f"{name:<28}{rows[-1]['device_ms']:>9.3f}{host:>9.3f}", flush=True)
    return rows


class Requests:
    """Makes requests of random tokens, each with a tag of its own."""

    def __init__(self, subject: Subject, prefix: str) -> None:
        self._subject, self._prefix, self._draw, self._number = subject, prefix, random.Random(prefix), 0

    def add(self, length: int, max_tokens: int) -> str:
        self._number += 1
        request = make_request(f"{self._prefix}-{self._number}", length, max_tokens, self._subject.vocab_size)
        self._subject.engine.add(request, tag=self._number)
        return request.request_id


def make_request(name: str, length: int, max_tokens: int, vocab_size: int) -> GenerationRequest:
    draw = random.Random(name)
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.8, ignore_eos=True, seed=draw.getrandbits(60))
    return GenerationRequest(
        request_id=name, prompt_ids=tuple(draw.choices(range(vocab_size), k=length)), sampling=sampling
    )


def alone(subject: Subject, num_rows: int, piece: tuple[int, int], num_prompts: int, busy: float) -> Row:
    """`piece`: so many prompts at once, of so many tokens each. `busy`: see above."""
    engine, (at_once, length) = subject.engine, piece
    requests = Requests(subject, f"alone {num_rows} {piece} {busy}")
    running = [requests.add(1, MOST_TOKENS) for _ in range(num_rows)]
    for _ in range(8):
        turn(engine)
    timeline = Timeline(engine, subject.executor)
    with thread_beside(busy):
        for _ in range(num_prompts):
            for _ in range(at_once):
                requests.add(length, 1)
            for _ in range(PROMPT_EVERY):
                turn(engine)
    timeline.close()
    for name in running:
        engine.cancel(name)
    turn(engine)
    return {"rows": num_rows, "prompts": at_once, "length": length, "busy": busy, **timeline.figures()}


@contextlib.contextmanager
def thread_beside(share: float) -> Iterator[None]:
    """Threads are switched as in a server's engine process."""
    stop, before = threading.Event(), sys.getswitchinterval()

    def run() -> None:
        while not stop.is_set():
            until = time.perf_counter() + share / 1e3
            while time.perf_counter() < until:
                pass
            time.sleep((1.0 - share) / 1e3)

    thread = threading.Thread(target=run, name="busy")
    sys.setswitchinterval(SWITCH_S)
    if share:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        if share:
            thread.join()
        sys.setswitchinterval(before)


def turn(engine: Engine) -> None:
    engine.step()
    engine.take_tokens()


def calls(subject: Subject, num_rows: int, length: int) -> Row:
    """Of one step with a prompt, and of one without; the number of each call and its kernels' time."""
    engine, requests = subject.engine, Requests(subject, "calls")
    running, found = [requests.add(1, MOST_TOKENS) for _ in range(num_rows)], dict[str, Row]()
    for _ in range(8):
        turn(engine)
    for name, has_prompt in (("with a prompt", True), ("without", False)):
        activities = [torch.profiler.ProfilerActivity.CPU]
        activities += [torch.profiler.ProfilerActivity.CUDA] if HAS_GPU else []
        turn(engine)
        if HAS_GPU:
            torch.cuda.synchronize()
        if has_prompt:
            requests.add(length, 1)
        with torch.profiler.profile(activities=activities) as profile:
            turn(engine)
            if HAS_GPU:
                torch.cuda.synchronize()
        found[name] = _calls_of(profile)
    for name in running:
        engine.cancel(name)
    turn(engine)
    return found


def _calls_of(profile: Any) -> Row:
    called, kernels, kernel_us = Counter[str](), 0, 0.0
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CPU:
            called[event.name] += 1
        else:
            kernels, kernel_us = kernels + 1, kernel_us + event.self_device_time_total
    driver = {name: number for name, number in called.items() if name.startswith("cu")}
    ops = {name: number for name, number in called.most_common() if name.startswith("aten::")}
    return {"ops": sum(ops.values()), "most": dict([*ops.items()][:12]), "driver": driver, "kernels": kernels,
            "kernel_ms": kernel_us / 1e3}  # fmt: skip


class EngineBackend:
    """As much of a backend as the engine's side of a connection needs."""

    def __init__(self, subject: Subject) -> None:
        self.model, self.tokenizer, self.max_requests = subject.info, subject.tokenizer, 4096
        self.engine = AsyncEngine(subject.engine, pace=StreamPace(MAX_INTERVAL_S))
        self.submit, self.stats = self.engine.submit, self.engine.stats
        self.listen_tokens = self.engine.listen_tokens


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """What the gateways of the other process ask for."""

    path: str
    connections: int
    rows: int
    row_tokens: int
    prompts: int  # of each connection, one after the other
    length: int
    vocab_size: int


def gateways(load: Load, pipe: Any) -> None:
    """Another process: sends the times between which no tokens came, and the prompts' seconds to their end."""
    pipe.send(asyncio.run(_run_gateways(load)))


async def _run_gateways(load: Load) -> tuple[list[tuple[float, float]], list[float]]:
    shares = [len(range(index, load.rows, load.connections)) for index in range(load.connections)]
    found = await asyncio.gather(*(_gateway(load, index, number) for index, number in enumerate(shares)))
    return [gap for gaps, _ in found for gap in gaps], [wait for _, waits in found for wait in waits]


async def _gateway(load: Load, index: int, num_rows: int) -> tuple[list[tuple[float, float]], list[float]]:
    from nsm_core.wire import local as wire
    from service.backends.process.engine_link import EngineLink

    at, left, ended = list[float](), set(range(num_rows)), dict[int, asyncio.Event]()
    all_ended = asyncio.Event()

    def take(message: wire.ToGateway) -> None:
        if not isinstance(message, wire.Step):
            return
        if message.numbers and len(left) == num_rows:
            at.append(time.perf_counter())
        for number, _ in message.ends:
            left.discard(number)
            if number in ended:
                ended[number].set()
        if not left:
            all_ended.set()

    transport, link = await asyncio.get_running_loop().create_unix_connection(lambda: EngineLink(take), load.path)
    await link.first
    for number in range(num_rows):
        request = make_request(f"row {index}-{number}", 5, load.row_tokens, load.vocab_size)
        transport.write(wire.encode(wire.Submit(number, request)))
    waits = []
    for turn_number in range(load.prompts):
        await asyncio.sleep(0.01)
        number = num_rows + turn_number
        ended[number] = asyncio.Event()
        request = make_request(f"prompt {index}-{number}", load.length, 1, load.vocab_size)
        started = time.perf_counter()
        transport.write(wire.encode(wire.Submit(number, request)))
        await ended[number].wait()
        waits.append(time.perf_counter() - started)
    await all_ended.wait()
    transport.close()
    return list(itertools.pairwise(at)), waits


async def beside(subject: Subject, load: Load, switch_s: float) -> Row:
    """The engine serves until the other process is done."""
    from service.backends.process.server import EngineServer

    timeline, backend = Timeline(subject.engine, subject.executor), EngineBackend(subject)
    server = EngineServer(backend)  # type: ignore[arg-type]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(load.path)
        await backend.engine.start()
        await server.serve(sock)
        before, ours = sys.getswitchinterval(), None
        sys.setswitchinterval(switch_s)
        try:
            context = multiprocessing.get_context("spawn")
            ours, theirs = context.Pipe()
            process = context.Process(target=gateways, args=(load, theirs))
            process.start()
            gaps, waits = await _received(ours, process)
            process.join()
        finally:
            sys.setswitchinterval(before)
        await server.stop()
        await backend.engine.stop()
    timeline.close()
    seconds = [end - start for start, end in gaps]
    gap = [round(1e3 * float(value), 2) for value in np.percentile(seconds, (50, 90, 99, 100))]
    prompt = [round(1e3 * float(value), 2) for value in np.percentile(waits, (50, 99))] if waits else None
    row = {"switch_ms": 1e3 * switch_s, "rows": load.rows, "length": load.length, "prompts": load.prompts}
    largest = sorted(gaps, key=lambda gap: gap[0] - gap[1])[: max(1, len(gaps) // 100)]
    first = min(start for start, _ in gaps)
    causes = dict[str, str]()  # of many connections, one gap of each
    for start, end in largest:
        about = f"{1e3 * (end - start):.2f} ms at {start - first:.3f} s"
        causes.setdefault(timeline.between(start, end), about)
    at_p99 = [f"{about}: {steps}" for steps, about in [*causes.items()][-NUM_SHOWN:]]
    return {**row, "gap_ms": gap, "prompt_ms": prompt, **timeline.figures(), "largest_gaps": at_p99}


async def _received(pipe: Any, process: Any) -> tuple[list[tuple[float, float]], list[float]]:
    async with asyncio.timeout(GATEWAYS_S):
        while not pipe.poll():
            if not process.is_alive():
                raise RuntimeError("the process of the gateways ended without a result")
            await asyncio.sleep(0.02)
    result: tuple[list[tuple[float, float]], list[float]] = pipe.recv()
    return result


def show(row: Row) -> None:
    """One table: a line for each kind of step."""
    about = {name: value for name, value in row.items() if not isinstance(value, dict) and name != "largest_gaps"}
    print("  ".join(f"{name} {value}" for name, value in about.items()))
    for gap in row.get("largest_gaps", ()):
        print(f"    {gap}")
    for kind, found in row.items():
        if isinstance(found, dict):
            cells = (f"{name} {p50:.2f}/{p99:.2f}/{cpu:.2f}" for name, (p50, p99, cpu) in found["stages"].items())
            print(f"  {kind:<7} x {found['number']:<4} span {found['span']}  " + "  ".join(cells), flush=True)


def measure(args: argparse.Namespace, launches: Counter[str]) -> Row:
    subject = make_subject(args.model, args.slots, is_tiny=args.tiny)
    found: Row = {"device": [], "steps": [], "calls": {}, "beside": []}
    if HAS_GPU:
        print(f"{'a launch':<28}{'device':>9}{'host':>9}   ms")
        found["device"] = device_times(subject)
    print("stages: wall p50/wall p99/CPU p50, ms")
    launches.clear()
    for num_rows in args.rows:
        for piece in args.pieces:
            found["steps"].append(alone(subject, num_rows, piece, args.prompts, 0.0))
            show(found["steps"][-1])
    found["launches"] = dict(launches)
    for busy in args.busy:
        found["steps"].append(alone(subject, max(args.rows), max(args.pieces, key=math.prod), args.prompts, busy))
        show(found["steps"][-1])
    for repeat in range(args.repeats):
        for switch_ms, prompts in [(ms, number) for ms in args.switch_ms for number in (0, args.gateway_prompts)]:
            with tempfile.TemporaryDirectory() as directory:
                load = Load(f"{directory}/{repeat}.sock", args.connections, max(args.rows), args.row_tokens, prompts,
                            args.gateway_length, subject.vocab_size)  # fmt: skip
                found["beside"].append(asyncio.run(beside(subject, load, switch_ms / 1e3)))
            show(found["beside"][-1])
    found["calls"] = calls(subject, max(args.rows), max(length for _, length in args.pieces))
    print(json.dumps(found["calls"]))
    return found


@contextlib.contextmanager
def device(ms: Sequence[float]) -> Iterator[Counter[str]]:
    """The GPU, or one that computes nothing; launches are counted there alone."""
    if HAS_GPU:
        yield Counter()
        return
    from benchmarks.no_device import Clock, no_device

    with no_device(Clock(*ms)) as launches:
        yield launches


def piece_of(text: str) -> tuple[int, int]:
    at_once, _, length = text.partition("x")
    return int(at_once), int(length)


def main(argv: Sequence[str] | None = None) -> Row:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--tiny", action="store_true", default=not HAS_GPU, help="small layers")
    parser.add_argument("--slots", type=int, default=512)
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 128], help="that decode")
    pieces = ("1x64", "1x250", "1x500", "1x1000", "4x250", "8x120")
    parser.add_argument("--pieces", type=piece_of, nargs="+", default=[piece_of(text) for text in pieces])
    parser.add_argument("--prompts", type=int, default=25, help="of each piece")
    parser.add_argument("--busy", type=float, nargs="*", default=[0.33, 0.66], help="shares, with the largest piece")
    parser.add_argument("--connections", type=int, default=8, help="of the part with gateways")
    parser.add_argument("--row-tokens", type=int, default=1024, help="of each row there")
    parser.add_argument("--gateway-prompts", type=int, default=8, help="of each gateway, one after the other")
    parser.add_argument("--gateway-length", type=int, default=1000, help="tokens of each of those")
    parser.add_argument("--switch-ms", type=float, nargs="+", default=[0.5, 0.1], help="threads are switched after")
    parser.add_argument("--repeats", type=int, default=2, help="of the part with gateways")
    ms = "without a GPU: milliseconds of a step, of a prompt, and of each of its tokens beside"
    parser.add_argument("--device-ms", type=float, nargs=3, default=[0.53, 0.8, 0.0005], help=ms)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    with device(args.device_ms) as launches:
        result = {**about_this_run(), "device": torch.cuda.get_device_name() if HAS_GPU else "none",
                  **measure(args, launches)}  # fmt: skip
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
