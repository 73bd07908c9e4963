"""RWKV-7 of a public size from a file to a resumed session: `python -m benchmarks.rwkv7_serve --size 1.5B`.

Random weights. Written as bf16, converted, served, asked for a session's turns, killed, started again from a warm file
cache, and asked for the next turn of that session. A line of JSON each: seconds by the clock and, of starts, of the
processors, and the most memory that a process had. The directory is deleted at the end, unless it is named.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.http_gpu import ServerUnderTest
from benchmarks.rwkv7_file import write_file
from benchmarks.rwkv7_models import SIZES, config_of
from nsm_core.rwkv7.config import Rwkv7Config

ROOT = Path(__file__).parents[1]
POLL_S = 0.05
PROMPT, NUM_TOKENS = "the stone in the oldest house " * 20, 16
NSM = ("-P", "-c", "from service.cli.main import main; main()")

Row = dict[str, Any]


def peak_mb(pid: int) -> float:
    """The most resident memory that a process and its children had so far, in MB."""
    total = 0
    for process in (root := psutil.Process(pid), *root.children(recursive=True)):
        with contextlib.suppress(psutil.Error, OSError):
            status = Path(f"/proc/{process.pid}/status").read_text()
            total += int(status.partition("VmHWM:")[2].split()[0])
    return total / 1024


def convert(file: Path, directory: Path, weight_format: str) -> Row:
    """`nsm model convert`."""
    command = [sys.executable, *NSM, "model", "convert", str(file)]
    command += ["--out", str(directory), "--weight-format", weight_format]
    started, most = time.monotonic(), 0.0
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        with contextlib.suppress(psutil.Error, OSError, IndexError):
            most = max(most, peak_mb(process.pid))
        time.sleep(POLL_S)
    if process.returncode:
        raise RuntimeError("the file was not converted")
    num_bytes = sum(path.stat().st_size for path in directory.iterdir())
    return {"converted_to": weight_format, "seconds": time.monotonic() - started, "peak_mb": most, "bytes": num_bytes}


def ask(server: ServerUnderTest, number: int) -> Row:
    """A turn of the session."""
    host, port = server.address
    body = {"input": f"{PROMPT}{number}", "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}
    started = time.monotonic()
    with httpx.Client(base_url=f"http://{host}:{port}", timeout=600) as client:
        if number == 0:
            client.post("/v1/sessions", json={"id": "s"}).raise_for_status()
        answer = client.post("/v1/sessions/s/generate", json=body).raise_for_status().json()
    return {
        "turn": number,
        "seconds": time.monotonic() - started,
        "version": answer["session"]["version"],
        **answer["usage"],
    }


def measure(
    config: Rwkv7Config, name: str, directory: Path, *, weight_format: str, options: Sequence[str], num_turns: int
) -> Iterator[Row]:
    started = time.monotonic()
    file = write_file(config, directory, name)
    yield {"written": file.name, "seconds": time.monotonic() - started, "bytes": file.stat().st_size}
    model = file
    if weight_format != "bf16":
        model = directory / weight_format
        yield convert(file, model, weight_format)
    turns = iter(range(num_turns + 1))
    for start in ("first", "from a warm cache"):
        server = ServerUnderTest(["--model", str(model), *options], directory / "data", ROOT)
        try:
            used = {"cpu_seconds": server.cpu_s(), "peak_mb": peak_mb(server.pid)}
            yield {"start": start, "seconds": server.start_s, **used}
            for number in turns:
                yield ask(server, number)
                if number == num_turns - 1:
                    break
            yield {"served": start, "peak_mb": peak_mb(server.pid)}
        finally:
            server.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="0.1B")
    parser.add_argument("--weight-format", choices=["int8", "int4", "bf16"], default="int8")
    parser.add_argument(
        "--serve", default="--num-threads 2 --max-slots 2", help="options of nsm serve, as one argument"
    )
    parser.add_argument("--turns", type=int, default=3, help="before the kill; one comes after it")
    parser.add_argument("--directory", type=Path, help="keeps the files")
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        directory = arguments.directory or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for row in measure(
            config_of(arguments.size),
            f"rwkv7-random-{arguments.size}",
            directory,
            weight_format=arguments.weight_format,
            options=arguments.serve.split(),
            num_turns=arguments.turns,
        ):
            print(json.dumps({"size": arguments.size, **row}), flush=True)


if __name__ == "__main__":
    main()
