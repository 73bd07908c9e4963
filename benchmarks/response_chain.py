"""What a turn costs by its place in a chain: `python -m benchmarks.response_chain`. A table, then one line of JSON.

The stock `openai` client against `nsm serve` with pulse-books and SQLite, each response after the one before it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import openai

from benchmarks.measured_model import MEASURED_MODEL
from nsm_lab.provenance import source_commit

START_S = 120.0
NUM_COMPARED = 5  # turns: the last ones against those from the second on
QUESTION = "And what did they say to him then, when he came home at last?"


class Served(NamedTuple):
    """A server of its own, and its client."""

    client: openai.OpenAI
    pid: int

    def cpu_ms(self) -> float:
        """Processor time of the server so far, in steps of the kernel's tick (10 ms)."""
        fields = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * 1000 / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def serving(directory: str) -> Iterator[Served]:
    """`nsm serve` with its sessions in `directory`, until the end of the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [Path(sys.executable).with_name("nsm"), "serve", "--port", str(port), "--data-dir", directory]
    command += ["--model", MEASURED_MODEL]
    server = subprocess.Popen(command, env={**os.environ, "NSM_LOG_LEVEL": "warning"})
    client = openai.OpenAI(
        base_url=f"http://127.0.0.1:{port}/v1",
        api_key="none",
        max_retries=0,
        http_client=openai.DefaultHttpxClient(trust_env=False),  # no proxy for this machine
    )
    try:
        wait_for(client)
        yield Served(client, server.pid)
    finally:
        server.terminate()
        server.wait()


def wait_for(client: openai.OpenAI) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            client.models.list()
            return
        except openai.APIConnectionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def measure_turn(
    client: openai.OpenAI, model: str, previous: str | None, *, num_tokens: int, text: str = QUESTION
) -> dict[str, Any]:
    """One streamed turn: `ttft_ms` is from the request sent to the first text received."""
    start, ttft_ms, ended = time.perf_counter(), 0.0, None
    stream = client.responses.create(
        model=model,
        input=text,
        previous_response_id=previous,
        max_output_tokens=num_tokens,
        stream=True,
        extra_body={"ignore_eos": True, "seed": 0},
    )
    for event in stream:
        if event.type == "response.output_text.delta" and event.delta and not ttft_ms:
            ttft_ms = (time.perf_counter() - start) * 1000
        if event.type in ("response.completed", "response.incomplete"):
            ended = event.response
    if ended is None or ended.usage is None:
        raise RuntimeError("the response failed")
    context = ended.usage.input_tokens
    return {
        "id": ended.id,
        "context_tokens": context,
        "computed_tokens": context - ended.usage.input_tokens_details.cached_tokens,
        "ttft_ms": ttft_ms,
    }


def measure(num_turns: int, *, num_chains: int, num_tokens: int) -> list[dict[str, float]]:
    """For each place in the chain the medians over the chains."""
    chains: list[list[dict[str, Any]]] = []
    with tempfile.TemporaryDirectory() as directory, serving(directory) as (client, _):
        model = client.models.list().data[0].id
        measure_turn(client, model, None, num_tokens=num_tokens)  # warm-up
        for _ in range(num_chains):
            chain: list[dict[str, Any]] = []
            for _ in range(num_turns):
                previous = chain[-1]["id"] if chain else None
                chain.append(measure_turn(client, model, previous, num_tokens=num_tokens))
            chains.append(chain)
    names = ("context_tokens", "computed_tokens", "ttft_ms")
    rounds = zip(*chains, strict=True)
    return [{name: round(statistics.median(turn[name] for turn in turns), 2) for name in names} for turns in rounds]


def median_ttft(rows: list[dict[str, float]]) -> float:
    return statistics.median(row["ttft_ms"] for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=50, help="length of a chain, at least 2")
    parser.add_argument("--chains", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=16, help="new tokens of each turn")
    args = parser.parse_args()
    rows = measure(args.turns, num_chains=args.chains, num_tokens=args.tokens)
    print(f"{'turn':>6} {'context tokens':>15} {'computed tokens':>16} {'TTFT ms':>9}")
    shown = sorted({1, 2, 5, 10, 20, 50, 100, 200, 500, args.turns})
    for number in (number for number in shown if number <= args.turns):
        row = rows[number - 1]
        print(f"{number:>6} {row['context_tokens']:>15.0f} {row['computed_tokens']:>16.0f} {row['ttft_ms']:>9.1f}")
    fields = {
        "benchmark": "response_chain",
        "commit": source_commit(),
        "device": platform.machine(),
        "num_cores": os.cpu_count(),
        "chains": args.chains,
        "new_tokens": args.tokens,
        "ttft_last_over_first": round(median_ttft(rows[-NUM_COMPARED:]) / median_ttft(rows[1 : 1 + NUM_COMPARED]), 3),
        "turns": rows,
    }
    print(json.dumps(fields))


if __name__ == "__main__":
    main()
