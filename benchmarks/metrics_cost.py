"""What seeing costs: `python -m benchmarks.metrics_cost`. Tables, then one line of JSON.

- The engine with and without its accounts (energy by an estimate or RAPL, looks at the model every 5 s), in turns: CPU
  time of a token, which a busy neighbour distorts less than the clock's; and the parts alone: the accounts of one step,
  a reading of the meter, one look at the model.
- The gateway's own: one token's sample, one scrape.
- TTFT and E2E that the service tells, against those of a client on loopback.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import torch
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.measured_model import MEASURED_MODEL
from nsm_core.config import EngineConfig
from nsm_core.energy.ledger import EnergyLedger
from nsm_core.engine.engine import Engine
from nsm_core.engine.request import GenerationRequest
from nsm_core.engine.step_stats import meter_of
from nsm_core.execution.choose import ChosenExecutor, choose_executor
from nsm_core.model.loader import LoadedNsm, load_checkpoint
from nsm_core.model.observer import MAX_ROWS, MAX_SHARE, OBSERVE_EVERY_S, ModelObserver
from nsm_core.sampling.params import SamplingParams
from nsm_lab.provenance import source_commit
from service.app import create_app
from service.backends.local import LocalBackend
from service.server import bind, serve, uvicorn_config
from service.settings import Settings
from service.stores.sessions.sqlite import SqliteSessionStore
from service.telemetry.metrics.metrics import Metrics

PROMPT = tuple(range(1, 17))
ACCOUNTS, SAMPLE = "accounts of a step, batch 16", f"a look at the model, once in {OBSERVE_EVERY_S:g} s"
TTFT, E2E = "nsm_time_to_first_token_seconds", "nsm_e2e_request_latency_seconds"


class Subject:
    """An engine. Its observer's clock stands while another engine runs, so that looks are as rare as in a server."""

    def __init__(self, loaded: LoadedNsm, chosen: ChosenExecutor, *, batch: int, is_seen: bool) -> None:
        self._batch = batch
        self._ran_s = 0.0
        self._began: float | None = None
        self._engine = make_engine(loaded, chosen, batch=batch, clock=self.clock if is_seen else None)

    def clock(self) -> float:
        return self._ran_s + (0.0 if self._began is None else time.monotonic() - self._began)

    def run(self, *, seconds: float) -> float:
        """CPU seconds of this process for each token, over at least `seconds` of decoding."""
        self._began, cpu, num_tokens = time.monotonic(), time.process_time(), 0
        while time.monotonic() - self._began < seconds:
            for number in range(self._batch):
                sampling = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
                self._engine.add(GenerationRequest(request_id=str(number), prompt_ids=PROMPT, sampling=sampling))
            while self._engine.has_work:
                self._engine.step()
            num_tokens += 64 * self._batch
        self._ran_s, self._began = self.clock(), None
        return (time.process_time() - cpu) / num_tokens


def make_engine(loaded: LoadedNsm, chosen: ChosenExecutor, *, batch: int, clock: Callable[[], float] | None) -> Engine:
    """`clock`: of the observer; None for no accounts."""
    return Engine(
        loaded.model,
        loaded.tokenizer,
        fingerprint=loaded.fingerprint,
        config=EngineConfig(max_slots=batch, token_budget=max(256, batch), speculation="off"),
        executor=chosen.factory,
        meter=None if clock is None else meter_of(loaded.device),
        observer=None if clock is None else ModelObserver(loaded.model, clock=clock),
    )


def compare_engines(loaded: LoadedNsm, chosen: ChosenExecutor, args: argparse.Namespace) -> list[dict[str, float]]:
    rows = []
    print(f"{'batch':>5} {'plain us/token':>15} {'seen us/token':>15} {'costs':>8} {'spread':>8}")
    for batch in args.batches:
        engines = [Subject(loaded, chosen, batch=batch, is_seen=is_seen) for is_seen in (False, True)]
        for engine in engines:
            engine.run(seconds=1.0)
        pairs = []
        for number in range(args.rounds):  # each goes first as often as second
            order = engines if number % 2 == 0 else engines[::-1]
            times = [engine.run(seconds=args.seconds) for engine in order]
            pairs.append(times if number % 2 == 0 else times[::-1])
        ratios = [seen / plain - 1 for plain, seen in pairs]
        plain_us, seen_us = (statistics.median(times) * 1e6 for times in zip(*pairs, strict=True))
        spread = statistics.stdev(ratios) / len(ratios) ** 0.5
        row = {"batch": batch, "plain_us": plain_us, "seen_us": seen_us, "cost": statistics.median(ratios)}
        rows.append({**row, "spread": spread})
        print(f"{batch:>5} {plain_us:>15.1f} {seen_us:>15.1f} {row['cost']:>8.2%} {spread:>8.2%}")
    return rows


def us(work: Callable[[], object], repeats: int) -> float:
    """Microseconds of CPU time; the best of five."""
    best = float("inf")
    for _ in range(5):
        began = time.process_time()
        for _ in range(repeats):
            work()
        best = min(best, (time.process_time() - began) / repeats * 1e6)
    return best


def parts(loaded: LoadedNsm, backend: LocalBackend) -> dict[str, float]:
    """Each alone, in microseconds."""
    ledger, now = EnergyLedger(meter_of(loaded.device)), iter(range(10**9))
    tokens = {str(number): 1 for number in range(16)}
    observer = ModelObserver(loaded.model)
    state = loaded.model.initial_state(MAX_ROWS)
    names = [str(row) for row in range(MAX_ROWS)]
    metrics = Metrics(backend)
    record = metrics.requests.start(arrival=time.monotonic())
    return {
        ACCOUNTS: us(lambda: ledger.work(tokens, 0.01, now=next(now) * 1e-3), 1000),
        "a reading of the meter": us(meter_of(loaded.device).read, 1000),
        SAMPLE: us(lambda: observer.observe(names, is_fresh=[True] * MAX_ROWS, ids=[1] * MAX_ROWS, state=state), 3),
        "a token's sample in the gateway": us(record.token, 10_000),
        "a scrape": us(metrics.render, 5),
    }


def cost_by_parts(alone: dict[str, float], *, step_us: float) -> float:
    """Share of the engine's time: the accounts of every step, and looks, as often as they come."""
    return alone[ACCOUNTS] / step_us + min(alone[SAMPLE] / (OBSERVE_EVERY_S * 1e6), MAX_SHARE)


async def clocks(backend: LocalBackend, num_requests: int) -> dict[str, list[float]]:
    """What the service tells less what a client sees, request by request, in milliseconds."""
    app = create_app(Settings(port=0), backend, SqliteSessionStore(None))
    gaps: dict[str, list[float]] = {"ttft": [], "e2e": []}
    with bind("127.0.0.1", 0) as sock:
        task = asyncio.create_task(serve(app, uvicorn_config(app), sock))
        port = sock.getsockname()[1]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client:
            await _reach(client)
            for number in range(num_requests + 2):
                first_s, whole_s, sums = await _one(client, port)
                if number >= 2:
                    gaps["ttft"].append((sums[TTFT] - first_s) * 1e3)
                    gaps["e2e"].append((sums[E2E] - whole_s) * 1e3)
        app.state.services.lifecycle.begin_drain()
        task.cancel()
        await asyncio.wait((task,))
    return gaps


async def _reach(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(30):
        while True:
            try:
                await client.get("/health/live")
            except httpx.TransportError:
                await asyncio.sleep(0.05)
            else:
                return


async def _one(client: httpx.AsyncClient, port: int) -> tuple[float, float, dict[str, float]]:
    """A stream's TTFT and E2E by the clock of a client that only reads, and what the service's sums rose by."""
    body = json.dumps({"prompt": "The old house", "max_tokens": 24, "stream": True, "ignore_eos": True}).encode()
    before = await _sums(client)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    fields = ("host: x", "content-type: application/json", f"content-length: {len(body)}", "connection: close")
    head = "\r\n".join(("POST /v1/completions HTTP/1.1", *fields, "", ""))
    began, first_s = time.monotonic(), 0.0
    writer.write(head.encode() + body)
    while line := await reader.readline():
        if not first_s and line.startswith(b"data: ") and b'"text":""' not in line:
            first_s = time.monotonic() - began
        if line.startswith(b"data: [DONE]"):
            break
    whole_s = time.monotonic() - began
    if not first_s:
        raise RuntimeError("the server sent no text")
    writer.close()
    await writer.wait_closed()
    after = await _sums(client)
    return first_s, whole_s, {name: after[name] - before[name] for name in after}


async def _sums(client: httpx.AsyncClient) -> dict[str, float]:
    text = (await client.get("/metrics")).text
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {
        sample.name.removesuffix("_sum"): sample.value
        for sample in samples
        if sample.name in (f"{TTFT}_sum", f"{E2E}_sum")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MEASURED_MODEL, help="model directory or name")
    parser.add_argument("--executor", default="auto")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=6, help="2 or more")
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--requests", type=int, default=30)
    parser.add_argument("--clocks-only", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    loaded = load_checkpoint(args.model)
    chosen = choose_executor(loaded, args.executor)
    rows = [] if args.clocks_only else compare_engines(loaded, chosen, args)
    config = EngineConfig(speculation="off")
    backend = LocalBackend(loaded, config, executor=args.executor, meter=meter_of(loaded.device))
    alone = parts(loaded, backend)
    for name, value in alone.items():
        print(f"{name:<44} {value:>10.1f} us")
    for row in rows:
        row["cost_by_parts"] = cost_by_parts(alone, step_us=row["plain_us"] * row["batch"])
        print(f"batch {row['batch']:g}: {row['cost_by_parts']:.2%} of the engine's time by its parts")
    gaps = asyncio.run(clocks(backend, args.requests))
    print(f"{'service - client, ms':<22} {'best':>8} {'median':>8} {'worst':>8}")
    for name, off in gaps.items():
        best, worst = min(off, key=abs), max(off, key=abs)
        print(f"{name:<22} {best:>8.2f} {statistics.median(off):>8.2f} {worst:>8.2f}")
    about = {"commit": source_commit(), "model": loaded.name, "executor": chosen.name, "numerics": chosen.numerics}
    print(json.dumps({**about, "engine": rows, "parts_us": alone, "clocks_ms": gaps}))


if __name__ == "__main__":
    main()
