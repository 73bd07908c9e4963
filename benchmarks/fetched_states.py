"""Streams beside states that their worker fetches from the engine's process: `python -m benchmarks.fetched_states`.

An engine that computes nothing in a process of its own, and a worker's backend in another: `--streams` get a token each
`--step-ms`, while the worker fetches states of `--state-bytes` again and again, so many at once as `--fetchers` says.
Gaps between two pieces of a stream, and states a second. `--against DIR` measures another checkout in turns with this.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
ROOT = HERE.parent.parent
TOKENIZER = next((ROOT / "nsm_core" / "model" / "checkpoints").rglob("tokenizer.json"))
FETCH_S = 0.002  # what an engine needs for a copy
PAUSE_S = 0.01  # between two states of a fetcher


def run(main: Any) -> None:
    import uvicorn

    with asyncio.Runner(loop_factory=uvicorn.Config(app="").get_loop_factory()) as runner:
        runner.run(main)


async def serve(path: str, args: argparse.Namespace) -> None:
    """The engine, until the standard input ends."""
    from benchmarks.no_engine import NoBackend
    from service.backends.process.server import EngineServer

    raw = os.urandom(args.state_bytes)

    async def fetch(number: int) -> bytes:
        await asyncio.sleep(FETCH_S)
        return raw

    backend: Any = NoBackend(TOKENIZER, args.step_ms / 1e3)
    backend.fetch_state = fetch
    await backend.start()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(path)
        sock.listen()
        server = EngineServer(backend)
        await server.serve(sock)
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await backend.stop()
        await server.stop()


async def read(backend: Any, name: str, num_tokens: int) -> list[float]:
    """The seconds between the pieces of a stream."""
    from nsm_core.engine.request import GenerationRequest
    from nsm_core.sampling.params import SamplingParams

    sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    stream = backend.submit(GenerationRequest(request_id=name, prompt_ids=(1, 2, 3), sampling=sampling))
    at = [time.monotonic() async for _ in stream.batches()]
    return [later - earlier for earlier, later in itertools.pairwise(at)]


async def measure(path: str, args: argparse.Namespace) -> None:
    """As a worker."""
    from benchmarks.no_engine import reach

    backend = reach(Path(path))
    await backend.start()
    for num_fetchers in args.fetchers:
        num_fetched = 0

        async def fetch_on() -> None:
            nonlocal num_fetched
            while True:
                await backend.fetch_state(0)
                num_fetched += 1
                await asyncio.sleep(PAUSE_S)

        fetching = [asyncio.create_task(fetch_on()) for _ in range(num_fetchers)]
        began = time.monotonic()
        names = (f"{num_fetchers}-{number}" for number in range(args.streams))
        gaps = sorted(itertools.chain(*await asyncio.gather(*(read(backend, name, args.tokens) for name in names))))
        states_per_s = num_fetched / (time.monotonic() - began)
        for task in fetching:
            task.cancel()
        await asyncio.gather(*fetching, return_exceptions=True)
        at = {share: gaps[int(share / 100 * (len(gaps) - 1))] for share in (50, 99, 100)}
        found = {f"gap_ms_p{share}": round(1e3 * seconds, 1) for share, seconds in at.items()}
        print(json.dumps({"fetchers": num_fetchers, "states_per_s": round(states_per_s), **found}), flush=True)
    await backend.stop()


def measure_checkout(name: str, root: Path, options: list[str]) -> None:
    environ = {**os.environ, "PYTHONPATH": str(root), "PYTHONSAFEPATH": "1"}
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory) / "engine.sock")
        command = [sys.executable, str(HERE), *options]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        engine = subprocess.Popen([*command, "--engine", path], cwd=root, env=environ, **pipes)
        if engine.stdout is None or engine.stdin is None or not engine.stdout.readline():
            raise RuntimeError(f"the engine of {root} did not start")
        worker = [*command, "--worker", path]
        found = subprocess.run(worker, cwd=root, env=environ, check=True, stdout=subprocess.PIPE, text=True)
        for line in found.stdout.splitlines():
            print(f"{name:<8}", line, flush=True)
        engine.stdin.close()
        engine.wait(30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=500, help="of each stream")
    parser.add_argument("--step-ms", type=float, default=2.0)
    parser.add_argument("--state-bytes", type=int, default=3_780_616)
    parser.add_argument("--fetchers", type=int, nargs="+", default=[0, 1, 4])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine is not None:
        run(serve(args.engine, args))
    elif args.worker is not None:
        run(measure(args.worker, args))
    else:
        measure_all(args)


def measure_all(args: argparse.Namespace) -> None:
    from nsm_lab.provenance import command_line, source_commit

    print(json.dumps({"command": command_line(), "commit": source_commit(), "load": round(os.getloadavg()[0], 1)}))
    options = ["--streams", str(args.streams), "--tokens", str(args.tokens), "--step-ms", str(args.step_ms)]
    options += ["--state-bytes", str(args.state_bytes), "--fetchers", *map(str, args.fetchers)]
    roots = {"this": ROOT} if args.against is None else {"against": args.against.resolve(), "this": ROOT}
    for _ in range(args.repeats):
        for name, root in roots.items():
            measure_checkout(name, root, options)


if __name__ == "__main__":
    main()
