"""The engine and the gateway beside what a user would pick instead, in one run: `python -m benchmarks.peers`.

llama.cpp with random Llama, RWKV-7 and Mamba-2 of the size of pulse-books (Q8_0, of the Llama Q4_0 and Q4_K_M too;
`benchmarks.peers.build_llama` builds it), against pulse-books on its native kernels in int8 and int4; by turns, per CPU
second, engines with one thread each. A table with ratios and goals, then one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.measured_model import MEASURED_MODEL
from benchmarks.peers import figures, sessions, streams, turns
from benchmarks.peers.build_llama import DIRECTORY, VERSION, LlamaBuild
from benchmarks.peers.ceilings import measure_ceilings
from benchmarks.peers.engine import Ours, bundled_kernels, rwkv7_kernels
from benchmarks.peers.figures import KERNELS, KERNELS_INT4, LLAMA_CPP, OURS, OURS_INT4, OURS_INT4_HALF, Taken, add
from benchmarks.peers.llama import Llama
from benchmarks.peers.report import report
from nsm_core.errors import NsmError
from nsm_core.execution.native.precision import Precision
from nsm_lab.bench.machine import machine
from nsm_lab.provenance import command_line, source_commit, utc_now, versions

PARTS = ("ceilings", "engines", "context", "streams", "turns", "sessions")
ENGINE_PARTS = {"ceilings", "engines", "context"}
OWN_PARTS = {"turns"}  # without llama.cpp
CEILING_REPEATS = 9


def progress(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def measure_engines(build: LlamaBuild, args: argparse.Namespace) -> tuple[Taken, dict[str, str]]:
    """Ceilings, decoding, prompts, and decoding after a long text, each in rounds; ours lives in this process."""
    taken: Taken = {}
    most = max(args.batches)
    ours = Ours(OURS, "auto", args.model, max_batch=most)
    llamas = [Llama(build, name) for name in args.peers]
    owns = (
        ours,
        Ours(OURS_INT4, "native-int4", args.model, max_batch=most),
        Ours(OURS_INT4_HALF, "native-int4-fp16-states", args.model, max_batch=most),
        bundled_kernels(KERNELS, Precision.INT8, args.model, max_batch=most),
        bundled_kernels(KERNELS_INT4, Precision.INT4, args.model, max_batch=most),
        rwkv7_kernels(build.model("rwkv7"), max_batch=most),
    )
    subjects = {subject.name: subject for subject in (*owns, *llamas)}
    sizes = {"batches": args.batches, "num_tokens": args.tokens, "lengths": args.lengths}
    for number in range(args.rounds):
        if "ceilings" in args.parts:
            add(taken, OURS, measure_ceilings(args.model, repeats=CEILING_REPEATS))
            progress(f"ceilings, round {number + 1}")
        for name in streams.in_turn(list(subjects), number) if "engines" in args.parts else ():
            add(taken, name, subjects[name].decode_and_prefill(**sizes))
            progress(f"engines, round {number + 1}: {name}")
    for number in range(args.long_rounds if "context" in args.parts else 0):
        for subject in (ours, llamas[0]):
            add(taken, subject.name, subject.context(length=args.context, num_tokens=args.tokens))
            progress(f"after {args.context} tokens, round {number + 1}: {subject.name}")
    return taken, ours.about


def measure_servers(build: LlamaBuild, args: argparse.Namespace) -> Taken:
    taken: Taken = {}
    if "streams" in args.parts:
        with tempfile.TemporaryDirectory() as directory:
            work = {
                "clients": args.clients,
                "peers": args.peers,
                "num_words": args.stream_words,
                "num_tokens": args.stream_tokens,
                "threads": args.threads,
                "rounds": args.rounds,
                "progress": progress,
            }
            merge(taken, asyncio.run(streams.measure_streams(build, Path(directory), args.model, **work)))
    if "turns" in args.parts:
        with tempfile.TemporaryDirectory() as directory:
            work = {"threads": args.threads, "rounds": args.rounds, "progress": progress}
            merge(taken, asyncio.run(turns.measure_turns(Path(directory), args.model, **work)))
    if "sessions" in args.parts:
        sizes = {"length": args.session, "repeats": args.resumed}
        with tempfile.TemporaryDirectory() as directory:
            merge(taken, asyncio.run(sessions.measure_ours(Path(directory), args.model, **sizes)))
            progress(f"a session of {args.session} tokens: {OURS}")
            for name in args.session_peers:
                try:
                    merge(taken, asyncio.run(sessions.measure_llama(build, name, Path(directory), **sizes)))
                    progress(f"a session of {args.session} tokens: {name}")
                except NsmError as error:  # the last and longest of all: what was taken before is still reported
                    progress(f"a session of {args.session} tokens: {name} failed: {error}")
    return taken


def merge(taken: Taken, more: Taken) -> None:
    for subject, found in more.items():
        for name, values in found.items():
            taken.setdefault(subject, {}).setdefault(name, []).extend(values)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=DIRECTORY, help="where build_llama put llama.cpp")
    parser.add_argument("--model", type=Path, default=MEASURED_MODEL, help="ours: model directory or name")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=5, help="of ceilings, engines and streams, by turns")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=64, help="that each request decodes")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048], help="of prompts, in tokens")
    parser.add_argument("--context", type=int, default=8192, help="tokens before decoding against Llama")
    parser.add_argument("--long-rounds", type=int, default=1, help="of decoding after such a text")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--peers", nargs="+", choices=LLAMA_CPP, default=LLAMA_CPP, help="of engines and streams")
    parser.add_argument("--threads", type=int, default=1, help="of each server's model, for streams and turns")
    parser.add_argument("--stream-words", type=int, default=16, help="of each client's prompt")
    parser.add_argument("--stream-tokens", type=int, default=48, help="that each client asks for")
    parser.add_argument(
        "--session", type=int, default=32_768, help="tokens of the session that goes on after a restart"
    )
    parser.add_argument("--session-peers", nargs="+", choices=LLAMA_CPP, default=["rwkv7"])
    parser.add_argument("--resumed", type=int, default=7, help="turns that go on with it")
    parser.add_argument("--output", type=Path, help="file for the table and the JSON, PATH.txt and PATH.json")
    return parser.parse_args()


def main() -> None:
    args = parse()
    build, started = LlamaBuild(args.directory.absolute()), time.monotonic()
    if (missing := build.missing()) and not set(args.parts) <= OWN_PARTS:
        sys.exit(f"{missing[0]} is missing: run python -m benchmarks.peers.build_llama")
    torch.set_num_threads(1)
    where, created = machine(), utc_now()
    taken: Taken = {}
    about: dict[str, str] = {"model": str(args.model)}
    if set(args.parts) & ENGINE_PARTS:
        taken, about = measure_engines(build, args)
    merge(taken, measure_servers(build, args))
    wanted = figures.goals(
        batches=args.batches, lengths=args.lengths, context=args.context, clients=args.clients, session=args.session
    )
    verdicts = figures.judge(taken, wanted)
    result = {
        "command": command_line(),
        "commit": source_commit(),
        "created": created,
        "took_s": round(time.monotonic() - started),
        "machine": where,
        "threads": args.threads,
        "versions": {**versions(), "llama-cpp-python": VERSION},
        "subject": about,
        "taken": taken,
    }
    text = report(result, verdicts)
    print(text)
    print(json.dumps(result))
    if args.output is not None:
        args.output.with_suffix(".txt").write_text(f"{text}\n", "utf-8")
        args.output.with_suffix(".json").write_text(f"{json.dumps(result, indent=1)}\n", "utf-8")


if __name__ == "__main__":
    main()
