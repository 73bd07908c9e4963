"""What Triton adds to the engine: `python -m benchmarks.triton_overhead`. A table, then one line of JSON.

The same requests through the gateway's two backends, in turns, in one run: an engine in this process, and a real Triton
server on this machine with the same model and limits, over gRPC. First tokens are timed for one stream at a time: of a
fresh 16-token prompt, and of a 16-token turn that resumes a state; so is the way back of the state that a turn ends
with. Then one and many streams of tokens that keep none: wall time, and CPU seconds of every process in it, which a
busy neighbour does not distort. What is added to a first token depends little on the model, so `--small` shows it best
on a busy machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.measured_model import MEASURED_MODEL
from nsm_core.config import EngineConfig, ModelConfig
from nsm_core.engine.request import EndState, Finished, GenerationRequest, Resume, TokenEvent
from nsm_core.model.loader import load_checkpoint
from nsm_core.model.nsm import NsmModel
from nsm_core.model.storage import WeightFormat, save_model
from nsm_core.sampling.params import SamplingParams
from nsm_core.triton.supervisor import children_of, stubs_of
from nsm_lab.provenance import command_line, source_commit
from service.backends.base import InferenceBackend
from service.backends.local import LocalBackend
from service.backends.triton.backend import TritonBackend
from service.backends.triton.dev_server import TritonServer, default_home, write_repository

START_S = 120.0
PROMPT_TOKENS = 16
PROCESSES = ("gateway", "tritonserver", "worker")  # the engine in this process counts as the last
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclasses.dataclass
class Subject:
    """One backend. `pids`: of its processes beside this one; `end`: of the turn that others resume."""

    name: str
    backend: InferenceBackend
    pids: tuple[int, ...] = ()
    end: EndState | None = None
    samples: dict[str, list[float]] = dataclasses.field(default_factory=dict)

    def add(self, what: str, value: float) -> None:
        self.samples.setdefault(what, []).append(value)

    def cpu_s(self) -> tuple[float, ...]:
        """CPU seconds so far of each process that has a share in the work: this one, then `pids`."""
        return time.process_time(), *(_ticks(pid) / TICKS_PER_S for pid in self.pids)

    def resume(self) -> Resume:
        if self.end is None:
            raise RuntimeError("there is no turn to go on from")
        return Resume(
            state=self.end.state,
            position=self.end.position,
            fingerprint=self.backend.model.fingerprint,
            generated_counts=self.end.generated_counts,
        )


class Load:
    """The requests, the same for each subject."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._numbers = itertools.count()

    def request(
        self, seed: int, *, max_tokens: int, resume: Resume | None = None, keep_state: bool = True
    ) -> GenerationRequest:
        rng = random.Random(seed)
        return GenerationRequest(
            request_id=str(next(self._numbers)),
            prompt_ids=tuple(rng.randrange(1, self._vocab_size) for _ in range(PROMPT_TOKENS)),
            sampling=SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True),
            resume=resume,
            keep_state=keep_state,
        )

    async def first_token(self, subject: Subject, what: str, request: GenerationRequest) -> None:
        started = time.perf_counter()
        last_token_at = started
        async for event in subject.backend.submit(request).events():
            if isinstance(event, TokenEvent):
                last_token_at = time.perf_counter()
                if event.index == 1:
                    subject.add(what, (last_token_at - started) * 1e3)
            if isinstance(event, Finished):
                subject.add("last token to end state, ms", (time.perf_counter() - last_token_at) * 1e3)
                subject.end = event.end_state

    async def streams(self, subject: Subject, number: int, num_tokens: int) -> None:
        requests = [self.request(seed, max_tokens=num_tokens, keep_state=False) for seed in range(number)]
        started, cpu = time.perf_counter(), subject.cpu_s()
        await asyncio.gather(*(_read(subject.backend, request) for request in requests))
        total = number * num_tokens
        subject.add(f"{number} streams: ms/token", (time.perf_counter() - started) / total * 1e3)
        spent = [(now - before) / total * 1e3 for now, before in zip(subject.cpu_s(), cpu, strict=True)]
        subject.add(f"{number} streams: CPU ms/token", sum(spent))
        for name, value in zip(PROCESSES, spent if subject.pids else (0.0, 0.0, *spent), strict=True):
            subject.add(f"{number} streams: of it {name}", value)


async def _read(backend: InferenceBackend, request: GenerationRequest) -> None:
    async for event in backend.submit(request).events():
        if isinstance(event, Finished) and event.error is not None:
            raise event.error


def _ticks(pid: int) -> int:
    """User and system time of a process and its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return int(fields[11]) + int(fields[12])


@contextlib.contextmanager
def model_dir(args: argparse.Namespace) -> Iterator[Path]:
    """The model to be measured; a small one has random weights."""
    if not args.small:
        yield args.model
        return
    with tempfile.TemporaryDirectory() as directory:
        tokenizer = load_checkpoint(MEASURED_MODEL).tokenizer
        torch.manual_seed(0)
        config = ModelConfig(vocab_size=tokenizer.vocab_size, d_model=64, num_layers=2, num_heads=2, mlp_hidden=64)
        save_model(NsmModel(config).requires_grad_(False), tokenizer, Path(directory), WeightFormat.FP32)
        yield Path(directory)


@contextlib.contextmanager
def triton_server(args: argparse.Namespace, model: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The gRPC address of a server of its own, and the processes of it."""
    with tempfile.TemporaryDirectory() as directory:
        ports = [_free_port() for _ in range(3)]
        server = TritonServer(
            home=default_home(),
            repository=Path(directory),
            http_port=ports[0],
            grpc_port=ports[1],
            metrics_port=ports[2],
        )
        parameters = {
            "num_threads": str(args.threads),
            "max_slots": str(args.streams),
            "model": str(model.resolve()),
        }
        write_repository(server.repository, parameters)
        command = [sys.executable, "-m", "nsm_core.triton.supervisor", f"--prefix={server.region_prefix}"]
        supervisor = subprocess.Popen(
            [*command, *server.command()],
            env=server.environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield f"{server.host}:{server.grpc_port}", _pids(supervisor)
        finally:
            supervisor.send_signal(signal.SIGTERM)
            supervisor.wait()


def _pids(supervisor: subprocess.Popen[bytes]) -> tuple[int, ...]:
    """Of tritonserver and of the process that runs the model, once there is one."""
    deadline = time.monotonic() + START_S
    while supervisor.poll() is None and time.monotonic() < deadline:
        for server in children_of(supervisor.pid):
            stubs, _ = stubs_of(server)
            if stubs:
                return server, *stubs
        time.sleep(0.1)
    raise RuntimeError("the Triton server did not start")


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


async def measure(subjects: list[Subject], args: argparse.Namespace) -> None:
    load = Load(subjects[0].backend.model.vocab_size)
    for subject in subjects:  # warm-up
        await load.first_token(subject, "warm-up", load.request(0, max_tokens=2))
        await load.streams(subject, args.streams, 2)
        subject.samples.clear()
    for turn in range(args.turns):
        for subject in subjects:
            await load.first_token(subject, "first token of a fresh prompt, ms", load.request(turn, max_tokens=2))
            resumed = load.request(turn, max_tokens=2, resume=subject.resume())
            await load.first_token(subject, "first token of a resumed turn, ms", resumed)
    for _ in range(args.repeats):
        for number, num_tokens in ((1, args.tokens), (args.streams, args.tokens)):
            for subject in subjects:
                await load.streams(subject, number, num_tokens)


def report(local: Subject, triton: Subject) -> dict[str, dict[str, float]]:
    """Medians of both, and of the difference; the least of each, which neighbours distort least."""
    rows = {}
    print(f"{'':<36} {'engine':>9} {'Triton':>9} {'added':>9} {'added %':>8} {'(least)':>9} {'(least)':>9} {'%':>6}")
    for what, mine in local.samples.items():
        theirs = triton.samples[what]
        one, other = statistics.median(mine), statistics.median(theirs)
        least, other_least = min(mine), min(theirs)
        rows[what] = {"engine": one, "triton": other, "engine_least": least, "triton_least": other_least}
        print(
            f"{what:<36} {one:>9.2f} {other:>9.2f} {other - one:>9.2f} {_percent(one, other):>8}"
            f" {least:>9.2f} {other_least:>9.2f} {_percent(least, other_least):>6}"
        )
    return rows


def _percent(base: float, value: float) -> str:
    return f"{100 * (value / base - 1):.1f}" if base > 1e-2 else "-"


async def run(args: argparse.Namespace, model: Path, url: str, pids: tuple[int, ...]) -> None:
    loaded = load_checkpoint(model)
    local = LocalBackend(loaded, EngineConfig(max_slots=args.streams))
    triton = TritonBackend([url], wait_s=START_S, fingerprint=loaded.fingerprint)
    async with contextlib.AsyncExitStack() as stack:
        for backend in (local, triton):
            await backend.start()
            stack.push_async_callback(backend.stop)
        subjects = [Subject("engine", local), Subject("triton", triton, pids)]
        await measure(subjects, args)
        rows = report(*subjects)
    about = {
        "command": command_line(),
        "commit": source_commit(),
        "numerics": loaded.numerics,
        "threads": args.threads,
        "load": os.getloadavg()[0],
        "fingerprint": loaded.fingerprint,
        "state_bytes": local.model.state_bytes,
        "state_hits": triton.upstream_stats().num_state_hits,
    }
    print(json.dumps({**about, "rows": rows}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    models = parser.add_mutually_exclusive_group()
    models.add_argument("--model", type=Path, default=MEASURED_MODEL, help="model directory or name")
    models.add_argument("--small", action="store_true", help="a random one, whose steps are short beside what is added")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=20, help="first tokens to be timed")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=48, help="of each stream")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with model_dir(args) as model, triton_server(args, model) as (url, pids):
        asyncio.run(run(args, model, url, pids))


if __name__ == "__main__":
    main()
