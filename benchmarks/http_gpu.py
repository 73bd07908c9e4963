"""What a client gets of a server over HTTP: `python -m benchmarks.http_gpu`. A table, then one line of JSON.

It starts `nsm serve` with the options after `--serve`, in processes of its own, and reads the streams from sockets in
others. Prompts are random words of the test books, so that no prefix repeats. First so many streams at once, then turns
of sessions, then streams beside which long prompts come one after the other. "first": from the request to the first
piece of text; "gap": between two pieces of one stream, of which a busy server's have several tokens. CPU time is of all
processes of the server, for a token.

On a GPU: `python -m benchmarks.http_gpu --serve "--device cuda --workers 4"`; on a CPU take small numbers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import multiprocessing
import os
import random
import re
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from nsm_lab.provenance import command_line, source_commit
from nsm_lab.training.data_files import read_documents

ROOT = Path(__file__).parents[1]
BOOKS = ROOT / "data" / "books-sample"
URL = re.compile(r"serving .* on http://([^:\s]+):(\d+)")
TEXT = b'"text":"'
NO_TEXT = b'"text":""'
USAGE = re.compile(rb'"completion_tokens":(\d+)')
PROMPT = re.compile(rb'"prompt_tokens":(\d+)')
START_S = 300.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One measurement: `number` at once, spread over client processes; `turns` of each session, 0 for streams.

    `num_each`: sessions that each of them has turns of, one after the other. `prompts_each`: long prompts that each
    process sends beside its streams, one after the other, of `prompt_words` words; they are not among what was seen.
    """

    number: int
    num_tokens: int
    num_words: int
    turns: int = 0
    num_each: int = 1
    prompts_each: int = 0
    prompt_words: int = 0


@dataclasses.dataclass(slots=True)
class Seen:
    """What clients saw, in seconds: of each stream the time to its first text, all gaps between pieces, and the time
    from its last text to its end, in which a session's turn is committed.
    """

    firsts: list[float] = dataclasses.field(default_factory=list)
    gaps: list[float] = dataclasses.field(default_factory=list)
    ends: list[float] = dataclasses.field(default_factory=list)
    num_tokens: int = 0
    num_turns: int = 0
    num_failed: int = 0
    num_read: int = 0  # tokens of the prompts of these streams
    num_prompt_tokens: int = 0  # of the long prompts

    def add(self, other: Seen) -> None:
        self.firsts += other.firsts
        self.gaps += other.gaps
        self.ends += other.ends
        self.num_tokens += other.num_tokens
        self.num_turns += other.num_turns
        self.num_failed += other.num_failed
        self.num_read += other.num_read
        self.num_prompt_tokens += other.num_prompt_tokens


class Reader(asyncio.Protocol):
    """Sends one request and notes when text comes."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._tail = b""
        self.times: list[float] = []
        self.ended_at = 0.0  # after the request, like `times`
        self.num_tokens = self.num_prompt_tokens = 0
        self.is_whole = False
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._began = time.perf_counter()
        transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        if data.count(TEXT) > data.count(NO_TEXT):
            self.times.append(time.perf_counter() - self._began)
        self._tail = (self._tail + data)[-2048:]
        if self._tail.endswith(b"0\r\n\r\n") and not self.ended.done():
            found = USAGE.search(self._tail)
            self.num_tokens = int(found[1]) if found else 0
            read = PROMPT.search(self._tail)
            self.num_prompt_tokens = int(read[1]) if read else 0
            self.is_whole = found is not None and b"data: [DONE]" in self._tail
            self.ended_at = time.perf_counter() - self._began
            self.ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


class Client:
    """The streams and sessions of one process."""

    def __init__(self, address: tuple[str, int], seed: int) -> None:
        self._address = address
        self._draw = random.Random(seed)
        self._words = [word for document in read_documents(BOOKS, "test") for word in document.text.split()]
        self.seen = Seen()

    def draw_seed(self) -> int:
        """For another client."""
        return self._draw.getrandbits(32)

    async def stream(self, path: str, body: dict[str, Any]) -> None:
        body = {**body, "ignore_eos": True, "temperature": 0.8, "stream": True}
        body["stream_options"] = {"include_usage": True}
        reader = Reader(self._request(path, body))
        transport, _ = await asyncio.get_running_loop().create_connection(lambda: reader, *self._address)
        await reader.ended
        transport.close()
        seen, times = self.seen, reader.times
        seen.num_failed += not reader.is_whole
        seen.num_tokens += reader.num_tokens
        seen.num_read += reader.num_prompt_tokens
        seen.firsts += times[:1]
        seen.gaps += [later - earlier for earlier, later in itertools.pairwise(times)]
        seen.ends += [reader.ended_at - last for last in times[-1:] if reader.is_whole]

    async def session(self, load: Load) -> None:
        """Sessions of its own, turn after turn, each in its turn."""
        names = [f"bench-{self._draw.getrandbits(60):x}" for _ in range(load.num_each)]
        for name in names:
            await self._create(name)
        for _ in range(load.turns):
            for name in names:
                body = {"input": self._prompt(load.num_words), "max_tokens": load.num_tokens}
                await self.stream(f"/v1/sessions/{name}/generate", body)
                self.seen.num_turns += 1

    async def completion(self, load: Load) -> None:
        await self.stream("/v1/completions", {"prompt": self._prompt(load.num_words), "max_tokens": load.num_tokens})

    async def prompts(self, load: Load) -> Seen:
        """Long prompts, one after the other: one token is sampled of each."""
        for _ in range(load.prompts_each):
            await self.stream("/v1/completions", {"prompt": self._prompt(load.prompt_words), "max_tokens": 1})
        return Seen(num_failed=self.seen.num_failed, num_prompt_tokens=self.seen.num_read)

    async def _create(self, name: str) -> None:
        reader, writer = await asyncio.open_connection(*self._address)
        writer.write(self._request("/v1/sessions", {"id": name}, close=True))
        if b" 20" not in await reader.readline():
            raise RuntimeError("no session could be created")
        writer.close()

    def _prompt(self, num_words: int) -> str:
        return " ".join(self._draw.choices(self._words, k=num_words))

    def _request(self, path: str, body: dict[str, Any], *, close: bool = False) -> bytes:
        raw = json.dumps(body).encode()
        lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json"]
        lines += [f"content-length: {len(raw)}", *(["connection: close"] if close else []), "", ""]
        return "\r\n".join(lines).encode() + raw


def client_process(address: tuple[str, int], seed: int, load: Load, number: int, pipe: Any) -> None:
    """`number` of the load's streams or sessions, when the parent says so."""

    async def run() -> None:
        work = client.session if load.turns else client.completion
        *_, of_prompts = await asyncio.gather(*(work(load) for _ in range(number)), beside.prompts(load))
        client.seen.add(of_prompts)

    client = Client(address, seed)
    beside = Client(address, client.draw_seed())  # made before the clock runs: it reads books
    pipe.send("ready")
    pipe.recv()
    asyncio.run(run())
    pipe.send(client.seen)


class ServerUnderTest:
    """`nsm serve` of a checkout, and its children."""

    def __init__(self, options: Sequence[str], data_dir: Path, root: Path) -> None:
        run = "from service.cli.main import main; main()"
        command = [sys.executable, "-c", run, "serve", "--port", "0", "--data-dir", str(data_dir), *options]
        found_first = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
        environ = {**os.environ, "PYTHONPATH": found_first, "PYTHONSAFEPATH": "1"}
        self._process = subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True)
        started = time.monotonic()
        self.address = self._read_address()
        self.start_s = time.monotonic() - started

    def _read_address(self) -> tuple[str, int]:
        lines = self.start_lines = list[str]()  # of the log, up to that with the address
        for line in self._process.stderr or ():
            lines.append(line)
            found = URL.search(line)
            if found:
                self._draining = threading.Thread(target=self._drain, daemon=True)
                self._draining.start()
                return found[1], int(found[2])
        raise RuntimeError("the server did not start:\n" + "".join(lines))

    def _drain(self) -> None:
        for _ in self._process.stderr or ():
            pass  # a full pipe would stop the server

    def cpu_s(self) -> float:
        """CPU seconds of all its processes so far."""
        root = psutil.Process(self._process.pid)
        times = [process.cpu_times() for process in (root, *root.children(recursive=True))]
        return sum(spent.user + spent.system for spent in times)

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """As `kill -9` does, its children too."""
        root = psutil.Process(self._process.pid)
        for process in (*root.children(recursive=True), root):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._ended()

    def stop(self) -> None:
        self._process.terminate()
        self._ended()

    def _ended(self) -> None:
        self._process.wait(60)
        self._draining.join()
        if self._process.stderr is not None:
            self._process.stderr.close()


@contextlib.contextmanager
def served(options: Sequence[str], root: Path = ROOT) -> Iterator[ServerUnderTest]:
    """`root`: the checkout."""
    with tempfile.TemporaryDirectory() as directory:
        server = ServerUnderTest(options, Path(directory), root)
        try:
            yield server
        finally:
            server.stop()


def measure(server: ServerUnderTest, load: Load, num_clients: int, seed: int) -> dict[str, float]:
    """The figures of one load."""
    seen, wall_s, cpu_s = observe(server, load, num_clients, seed)
    return figures_of(seen, wall_s, cpu_s)


def observe(server: ServerUnderTest, load: Load, num_clients: int, seed: int) -> tuple[Seen, float, float]:
    """What the clients saw of one load, its wall time and the server's CPU time, in seconds."""
    context = multiprocessing.get_context("spawn")
    shares = [load.number // num_clients + (index < load.number % num_clients) for index in range(num_clients)]
    pipes, processes = [], []
    for index, share in enumerate(share for share in shares if share):
        ours, theirs = context.Pipe()
        processes.append(
            context.Process(target=client_process, args=(server.address, seed + index, load, share, theirs))
        )
        processes[-1].start()
        pipes.append(ours)
    for pipe in pipes:
        pipe.recv()
    cpu_s, started = server.cpu_s(), time.perf_counter()
    for pipe in pipes:
        pipe.send("go")
    seen = Seen()
    for pipe in pipes:
        seen.add(pipe.recv())
    wall_s, cpu_s = time.perf_counter() - started, server.cpu_s() - cpu_s
    for process in processes:
        process.join()
    return seen, wall_s, cpu_s


def figures_of(seen: Seen, wall_s: float, cpu_s: float) -> dict[str, float]:
    """Rates a second, times in milliseconds, CPU microseconds a token."""
    return {
        "tokens_per_s": seen.num_tokens / wall_s,
        "turns_per_s": seen.num_turns / wall_s,
        "first_ms_p50": quantile(seen.firsts, 0.5) * 1e3,
        "first_ms_p95": quantile(seen.firsts, 0.95) * 1e3,
        "gap_ms_p50": quantile(seen.gaps, 0.5) * 1e3,
        "gap_ms_p99": quantile(seen.gaps, 0.99) * 1e3,
        "end_ms_p50": quantile(seen.ends, 0.5) * 1e3,
        "end_ms_p95": quantile(seen.ends, 0.95) * 1e3,
        "tokens_per_piece": seen.num_tokens / max(1, len(seen.firsts) + len(seen.gaps)),
        "cpu_us_per_token": cpu_s / max(1, seen.num_tokens) * 1e6,
        "num_failed": seen.num_failed,
        "prompt_tokens_per_s": seen.num_prompt_tokens / wall_s,
    }


def quantile(values: Sequence[float], share: float) -> float:
    """NaN of nothing."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


HEAD = (
    f"{'at once':<14}{'tok/s':>9}{'turns/s':>9}{'first p50/p95, ms':>20}{'gap p50/p99, ms':>18}"
    f"{'end p50/p95, ms':>18}{'CPU us/tok':>12}{'failed':>8}"
)


def row_of(load: Load, found: dict[str, float]) -> str:
    """A line of the table."""
    kind = "sessions" if load.turns else "+prompts" if load.prompts_each else "streams"
    first = f"{found['first_ms_p50']:.0f} / {found['first_ms_p95']:.0f}"
    gap = f"{found['gap_ms_p50']:.1f} / {found['gap_ms_p99']:.1f}"
    end = f"{found['end_ms_p50']:.1f} / {found['end_ms_p95']:.1f}"
    return (
        f"{load.number:>4} {kind:<9}{found['tokens_per_s']:>9,.0f}{found['turns_per_s']:>9.1f}{first:>20}{gap:>18}"
        f"{end:>18}{found['cpu_us_per_token']:>12.1f}{found['num_failed']:>8}"
    )


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", default="", help="options of nsm serve, as one argument")
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 32, 128, 512])
    parser.add_argument("--tokens", type=int, default=128, help="of each stream")
    parser.add_argument("--words", type=int, default=30, help="of each prompt")
    parser.add_argument("--sessions", type=int, default=256, help="at once; 0: none")
    parser.add_argument("--turns", type=int, default=4, help="of each session")
    parser.add_argument("--turn-tokens", type=int, default=64)
    parser.add_argument("--sessions-each", type=int, nargs="*", default=[1], help="of each of those at once, in turns")
    parser.add_argument("--beside", type=int, default=0, help="streams with long prompts beside them; 0: none")
    parser.add_argument("--beside-tokens", type=int, default=1024, help="of each of those streams")
    parser.add_argument("--prompt-words", type=int, default=650, help="of each long prompt, about 1,000 tokens")
    parser.add_argument("--prompts", type=int, default=8, help="that each client process sends beside its streams")
    parser.add_argument("--clients", type=int, default=4, help="processes")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    loads = [Load(number=number, num_tokens=args.tokens, num_words=args.words) for number in args.streams]
    if args.sessions:
        turn = {"num_tokens": args.turn_tokens, "num_words": args.words, "turns": args.turns}
        loads += [Load(number=args.sessions, num_each=each, **turn) for each in args.sessions_each]
    if args.beside:
        plain = Load(number=args.beside, num_tokens=args.beside_tokens, num_words=args.words)
        loads += [plain, dataclasses.replace(plain, prompts_each=args.prompts, prompt_words=args.prompt_words)]
    rows = []
    with served(shlex.split(args.serve)) as server:
        print(f"started in {server.start_s:.1f} s", *(line.rstrip() for line in server.start_lines), sep="\n")
        print(HEAD)
        measure(server, loads[0], args.clients, args.seed - 1000)  # a warm-up
        for index, load in enumerate(loads):
            found = measure(server, load, args.clients, args.seed + 1000 * index)
            rows.append({**dataclasses.asdict(load), **found})
            print(row_of(load, found))
    about = {"command": command_line(), "commit": source_commit(), "serve": args.serve, "start_s": server.start_s}
    result = {**about, "rows": rows}
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
