"""How much of everything so many sessions need: `python -m benchmarks.sizing`. Tables, then one line of JSON.

Arithmetic from figures that were measured (each names where), and a simulation (`benchmarks.sizing_fleet`) of a busy
hour with the turns and pauses of the public traces in loadtests/traces: servers, requests that run at once, slots in
use, first tokens, and what goes to and from the store. States in fp32 become snapshots as servers store them
(service/state/keeper.py); rounded ones are stored with each turn. `read again`: tokens of sessions' logs, for a turn.
The same seed gives the same tables.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.sizing_fleet import Fleet, Outcome, Policy, Speed, TurnSize, conversations_of
from loadtests.arrivals import TRACES, TraceRow, read_trace
from service.state.keeper import BUSY_BYTES, IDLE_S, LONG_TURN_BYTES, limit_at, tokens_worth

RAW_STATE_BYTES = 3_780_616  # of pulse-books: benchmarks/results/state_dtype-cpu.txt, a state with each turn
STORED = {"fp32": 1.000, "fp16": 0.500, "int8": 0.258}  # the same file: of a snapshot
# The same file: of a session of 1,000 turns of 80 tokens in Redis, with so many older snapshots
IN_REDIS = {"fp32": (1.21, 2.31, 3.42), "fp16": (0.65, 1.21, 1.76), "int8": (0.37, 0.65, 0.93)}
PACKED = 0.839  # benchmarks/results/state_packing-cpu.txt: of an fp32 snapshot, after 4,000 tokens
TURN_BYTES = 3_100  # benchmarks/results/turn_commit-cpu.txt: a turn without snapshots, Redis `everysec`
STATE_CACHE_BYTES = 256 * 2**20  # NSM_STATE_CACHE_MB
# benchmarks/notes/redis.md: 2.25 MB read in 8.4 ms and written in 5.5 ms over one connection (`everysec`)
SHARD_BYTES_PER_S = 2 * 2_250_000 / (0.0084 + 0.0055)
SHARD_USED = 0.5  # the share of that to plan with
SHARD_FILL = 0.75  # and of `maxmemory`
MOST_BUSY = 0.9  # servers: where the search begins

SPEEDS = {
    # One thread. benchmarks/results/: engine-cpu.txt (native; a prompt of 8,192 tokens), gateway_cost-cpu.txt (paced
    # sessions, 99.2 us a token), state_packing-cpu.txt (a snapshot packed and unpacked)
    "cpu core": Speed(
        slots=16,
        read=3804.0,
        decode=((1, 916.0), (8, 2851.0), (16, 2833.0), (32, 2799.0)),
        token_s=99.2e-6,
        load_s=5.8e-3,
        store_s=6.7e-3,
    ),
    # benchmarks/results/: gpu_ahead-h200.txt (through the engine, which looks ahead from 32 requests on),
    # gpu_decode-h200.txt (a prompt); the gateways' work is on other machines
    "h200": Speed(
        slots=512,
        read=1_300_000.0,
        decode=((1, 3146.0), (64, 134_612.0), (512, 351_499.0)),
        token_s=0.0,
        load_s=0.0,
        store_s=0.0,
    ),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """`first_token_s`: at most so long for 95 of 100 turns, on the machine of the name."""

    file: str
    first_token_s: dict[str, float]


WORKLOADS = {
    # 3 s: from where the alert NsmFirstTokenSlow fires
    "azure": Workload("azure-conv-2023.csv", {"cpu core": 3.0, "h200": 1.0}),
    # Prompts of 13,000 tokens: 3.5 s of a core before anybody waits
    "mooncake": Workload("mooncake-conversation.jsonl.zst", {"cpu core": 30.0, "h200": 1.0}),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What is asked for. `peak`: the busy hour against the mean of the day."""

    turns_per_day: float = 1.0
    peak: float = 2.5
    dtype: str = "fp32"
    retained: int = 2
    shard_gib: int = 64  # `maxmemory` of a shard; its machine has about twice that
    seed: int = 0
    max_servers: int = 64  # simulated; a larger fleet is so many like it
    min_turns: int = 2_000
    warm_up_s: float = 300.0
    measured_s: float = 600.0

    def turn_rate(self, sessions: int) -> float:
        """Turns/s in the busy hour."""
        return sessions * self.turns_per_day * self.peak / 86_400


def turns_of(rows: Sequence[TraceRow]) -> list[TurnSize]:
    return [turn for conversation in conversations_of(rows) for turn in conversation]


def session_bytes(dtype: str, retained: int) -> float:
    """Of a long session in Redis."""
    return RAW_STATE_BYTES * IN_REDIS[dtype][retained]


def memory_shards(sessions: int, dtype: str, retained: int, shard_gib: int) -> int:
    return math.ceil(sessions * session_bytes(dtype, retained) / (shard_gib * 2**30 * SHARD_FILL))


def policy_of(speed: Speed, dtype: str) -> Policy:
    """That of a server with default settings. On a GPU `in_memory` is rows of the device and of host memory."""
    limit = 0 if dtype != "fp32" else limit_at(speed.read)
    return Policy(
        limit=limit,
        long=tokens_worth(RAW_STATE_BYTES, LONG_TURN_BYTES, limit),
        busy=tokens_worth(RAW_STATE_BYTES, BUSY_BYTES, limit),
        idle_s=IDLE_S,
        in_memory=STATE_CACHE_BYTES // RAW_STATE_BYTES,
    )


def snapshot_bytes(dtype: str) -> float:
    return RAW_STATE_BYTES * (PACKED if dtype == "fp32" else STORED[dtype])


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """The least fleet that was tried and kept the objective. Figures of requests and slots are the whole fleet's."""

    servers: int
    busy: float  # share of a server's time, by arithmetic
    running_mean: float
    running_p99: float
    slots_mean: float  # share of all slots in use
    slots_p99: float
    wait_p99_s: float
    first_token_p95_s: float
    loaded: float  # snapshots read for a turn
    stored: float  # and written
    replayed: float  # tokens read again for a turn


def find_servers(rows: Sequence[TraceRow], speed: Speed, turn_rate: float, objective_s: float, goal: Goal) -> Found:
    """Adds a twentieth of servers at a time, from as few as are busy for `MOST_BUSY` of their time."""
    load = turn_rate * statistics.fmean(speed.alone_s(turn) for turn in turns_of(rows))
    servers = math.ceil(load / MOST_BUSY)
    while True:
        simulated = min(servers, goal.max_servers)
        share = simulated / servers
        outcome = simulate(rows, speed, simulated, turn_rate * share, goal)
        first_s = percentile(outcome.first_tokens_s, 95)
        if first_s <= objective_s:
            return describe(outcome, servers, share, turn_rate, load, first_s, speed)
        servers = max(servers + 1, math.ceil(servers * 1.05))


def simulate(rows: Sequence[TraceRow], speed: Speed, servers: int, turn_rate: float, goal: Goal) -> Outcome:
    policy = policy_of(speed, goal.dtype)
    fleet = Fleet(rows, speed, servers=servers, turn_rate=turn_rate, seed=goal.seed, policy=policy)
    return fleet.run(warm_up_s=goal.warm_up_s, measured_s=max(goal.measured_s, goal.min_turns / turn_rate))


def describe(
    outcome: Outcome, servers: int, share: float, turn_rate: float, load: float, first_s: float, speed: Speed
) -> Found:
    running, running_p99 = statistics.fmean(outcome.running) / share, percentile(outcome.running, 99) / share
    loaded, stored, replayed = (value / outcome.turns for value in dataclasses.astuple(outcome.moved))
    load += turn_rate * (loaded * speed.load_s + stored * speed.store_s + replayed / speed.read)
    return Found(
        servers=servers,
        busy=load / servers,
        running_mean=running,
        running_p99=running_p99,
        slots_mean=running / (servers * speed.slots),
        slots_p99=running_p99 / (servers * speed.slots),
        wait_p99_s=percentile(outcome.waits_s, 99),
        first_token_p95_s=first_s,
        loaded=loaded,
        stored=stored,
        replayed=replayed,
    )


def percentile(values: Sequence[float], percent: int) -> float:
    """The smallest value that so many in a hundred do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def print_memory(tiers: Sequence[int], shard_gib: int) -> None:
    print(f"\nRedis: memory, and shards of {shard_gib} GiB filled to {SHARD_FILL:.0%}")
    print(f"{'':22}{'MB a session':>14}" + "".join(f"{sessions:>22,}" for sessions in tiers))
    for dtype, factors in IN_REDIS.items():
        for retained in range(len(factors)):
            size = session_bytes(dtype, retained)
            shards = (memory_shards(sessions, dtype, retained, shard_gib) for sessions in tiers)
            cells = [f"{n * size / 1e12:.3f} TB {count:5,}" for n, count in zip(tiers, shards, strict=True)]
            print(f"{dtype}, {retained} older{'':9}{size / 1e6:>14.2f}" + "".join(f"{cell:>22}" for cell in cells))


def size(name: str, machine: str, sessions: int, goal: Goal) -> dict[str, Any]:
    workload, speed = WORKLOADS[name], SPEEDS[machine]
    rows = read_trace(TRACES / workload.file)
    rate = goal.turn_rate(sessions)
    found = find_servers(rows, speed, rate, workload.first_token_s[machine], goal)
    read = found.loaded * snapshot_bytes(goal.dtype)
    written = found.stored * snapshot_bytes(goal.dtype) + TURN_BYTES
    traffic = rate * (read + written)
    return {
        "workload": name,
        "machine": machine,
        "sessions": sessions,
        "turns_per_s": rate,
        **dataclasses.asdict(found),
        "read_bytes_per_s": rate * read,
        "written_bytes_per_s": rate * written,
        "shards_for_traffic": math.ceil(traffic / (SHARD_BYTES_PER_S * SHARD_USED)),
        "shards_for_memory": memory_shards(sessions, goal.dtype, goal.retained, goal.shard_gib),
    }


COLUMNS = (
    "                                       running      slots in use      wait    first     read    MB/s of the store "
    "      shards for\n"
    "  sessions  turns/s  servers  busy    mean     p99    mean    p99   p99, s   p95, s    again       read   written "
    "  traffic  memory"
)


def print_row(row: dict[str, Any]) -> None:
    cells = (
        f"{row['sessions']:>10,}",
        f"{row['turns_per_s']:>8.2f}",
        f"{row['servers']:>8,}",
        f"{row['busy']:>5.0%}",
        f"{row['running_mean']:>7.1f}",
        f"{row['running_p99']:>7,.0f}",
        f"{row['slots_mean']:>7.1%}",
        f"{row['slots_p99']:>6.1%}",
        f"{row['wait_p99_s']:>8.2f}",
        f"{row['first_token_p95_s']:>8.2f}",
        f"{row['replayed']:>8,.0f}",
        f"{row['read_bytes_per_s'] / 1e6:>10,.1f}",
        f"{row['written_bytes_per_s'] / 1e6:>9,.1f}",
        f"{row['shards_for_traffic']:>9,}",
        f"{row['shards_for_memory']:>7,}",
    )
    print(" ".join(cells))


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, nargs="+", default=[10_000, 100_000, 1_000_000, 10_000_000])
    parser.add_argument("--turns-per-day", type=float, default=1.0, help="of a stored session, on average")
    parser.add_argument("--peak", type=float, default=2.5, help="the busy hour against the day's mean")
    parser.add_argument("--dtype", choices=sorted(IN_REDIS), default="fp32")
    parser.add_argument("--kept", type=int, choices=(0, 1, 2), default=2, help="older snapshots of a session")
    parser.add_argument("--shard-gib", type=int, default=64, help="maxmemory of a shard of Redis")
    parser.add_argument("--machines", nargs="+", choices=sorted(SPEEDS), default=list(SPEEDS))
    parser.add_argument("--workloads", nargs="+", choices=sorted(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a file for the line of JSON")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    args = arguments(words)
    goal = Goal(
        turns_per_day=args.turns_per_day,
        peak=args.peak,
        dtype=args.dtype,
        retained=args.kept,
        shard_gib=args.shard_gib,
        seed=args.seed,
    )
    print_memory(args.sessions, goal.shard_gib)
    table = []
    for machine in args.machines:
        for name in args.workloads:
            print(f"\n{name} on servers of one {machine}; states in {goal.dtype}, {goal.retained} older\n{COLUMNS}")
            for sessions in args.sessions:
                table.append(size(name, machine, sessions, goal))
                print_row(table[-1])
    line = json.dumps({"goal": dataclasses.asdict(goal), "rows": table})
    if args.out is not None:
        args.out.write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
