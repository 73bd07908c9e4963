"""What a client gets of `nsm serve` on a CPU: `python -m benchmarks.http_cpu`. A table, then one line of JSON.

Servers by turns in one run: this checkout's with each of `--threads`, and with `--against DIR` another checkout's too;
all run from the start, one at a time is asked. So many streams begin at once, with prompts of random words of the test
books and one client process, which shares the cores. "first": from the request to the first text; "gap": between two
pieces of one stream. Rates are by wall time, so they need a quiet machine; CPU time, of all threads, is for a token.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.about import about_this_run
from benchmarks.http_gpu import HEAD, ROOT, Load, measure, row_of, served


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout, with its kernels built")
    parser.add_argument("--threads", type=int, nargs="+", default=[1], help="of the model, a server for each")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--words", type=int, default=200, help="of each prompt; 200 are about 280 tokens")
    parser.add_argument("--tokens", type=int, default=128, help="of each stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", default="", help="more options of nsm serve, as one argument")
    args = parser.parse_args(argv)
    roots = {"this": ROOT} | ({} if args.against is None else {"against": args.against.resolve()})
    slots = max(args.streams)
    loads = [Load(number=number, num_tokens=args.tokens, num_words=args.words) for number in args.streams]
    taken: dict[str, dict[int, list[dict[str, float]]]] = {}
    with contextlib.ExitStack() as stack:
        servers = {}
        for threads in args.threads:
            for name, root in roots.items():
                options = ["--num-threads", str(threads), "--max-slots", str(slots), "--store", "memory"]
                options += shlex.split(args.serve)
                servers[f"{name}, threads {threads}"] = stack.enter_context(served(options, root))
        for name, server in servers.items():
            taken[name] = {load.number: [] for load in loads}
            measure(server, loads[0], 1, args.seed - 1)  # a warm-up
        for number in range(args.rounds):
            for load in loads:
                for name in list(servers) if number % 2 else reversed(servers):
                    found = measure(servers[name], load, 1, args.seed + number)
                    taken[name][load.number].append(found)
    print(f"{'':<20}{HEAD}")
    for load in loads:
        for name in servers:
            rows = taken[name][load.number]
            print(f"{name:<20}{row_of(load, {key: statistics.median(row[key] for row in rows) for key in rows[0]})}")
    result = {**about_this_run(), "taken": taken}
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
