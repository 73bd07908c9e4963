"""How much of the time that clients wait is in the server's metrics: `python -m benchmarks.counted_latency`.

Streams of `nsm serve` on this machine begin at once. Sums of `nsm_time_to_first_token_seconds` and
`nsm_inter_token_latency_seconds` are divided by those of the clients, in one run, so that the machine's speed is in
both. The metrics lack the time before the server reads the first byte and after it wrote a piece. A table, then one
line of JSON.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import urllib.request
from collections.abc import Sequence
from typing import Any

from benchmarks.about import about_this_run
from benchmarks.http_gpu import Load, ServerUnderTest, observe, served

FIRST, GAPS = "nsm_time_to_first_token_seconds_sum", "nsm_inter_token_latency_seconds_sum"


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--words", type=int, default=200, help="of each prompt; 200 are about 280 tokens")
    parser.add_argument("--tokens", type=int, default=64, help="of each stream")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    rows = []
    with served(["--max-slots", str(max(args.streams)), "--store", "memory"]) as server:
        print(f"{'streams':>7}{'first, of the clients':>24}{'gaps, of the clients':>23}")
        for number in args.streams:
            load = Load(number=number, num_tokens=args.tokens, num_words=args.words)
            found = [compare(server, load, args.seed + index) for index in range(args.rounds)]
            first, gaps = (statistics.median(row[key] for row in found) for key in ("first", "gaps"))
            rows.append({"streams": number, "first": first, "gaps": gaps, "rounds": found})
            print(f"{number:>7}{first:>24.3f}{gaps:>23.3f}")
    result = {**about_this_run(), "rows": rows}
    print(json.dumps(result))
    return result


def compare(server: ServerUnderTest, load: Load, seed: int) -> dict[str, float]:
    """The metrics' share of what the clients saw of one load."""
    before = sums(server)
    seen, _, _ = observe(server, load, 1, seed)
    if seen.num_failed:
        raise RuntimeError(f"{seen.num_failed} of {load.number} streams failed")
    after = sums(server)
    counted = {name: after[name] - before[name] for name in after}
    return {"first": counted[FIRST] / sum(seen.firsts), "gaps": counted[GAPS] / sum(seen.gaps)}


def sums(server: ServerUnderTest) -> dict[str, float]:
    host, port = server.address
    with urllib.request.urlopen(f"http://{host}:{port}/metrics") as answer:
        text = answer.read().decode()
    return {name: float(number[1]) for name in (FIRST, GAPS) if (number := re.search(rf"^{name} (\S+)$", text, re.M))}


if __name__ == "__main__":
    main()
