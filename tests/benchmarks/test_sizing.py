"""How much so many sessions need: the simulation against queueing theory, the arithmetic against what was measured."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from benchmarks import sizing
from benchmarks.sizing import SPEEDS, Goal, find_servers, memory_shards, percentile, policy_of, session_bytes
from benchmarks.sizing_fleet import (
    Fleet,
    Moved,
    Outcome,
    Policy,
    Server,
    Session,
    Speed,
    States,
    TurnSize,
    conversations_of,
)
from loadtests.arrivals import TraceRow

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
# A processor that serves 100 tokens/s, however many share it
PLAIN = Speed(slots=1_000, read=100.0, decode=((1, 100.0),), token_s=0.0, load_s=0.0, store_s=0.0)


def poisson(rate: float, count: int, tokens: int) -> list[TraceRow]:
    rng = random.Random(1)
    times = itertools.accumulate(rng.expovariate(rate) for _ in range(count))
    return [TraceRow(at_s, tokens, tokens, number) for number, at_s in enumerate(times)]


def run(speed: Speed, *, servers: int = 1, rate: float = 1.0, seconds: float = 5_000.0, seed: int = 0) -> Outcome:
    """Turns of half a second of a server, half of it to read."""
    fleet = Fleet(poisson(1.0, 2_000, 25), speed, servers=servers, turn_rate=rate, seed=seed)
    return fleet.run(warm_up_s=100.0, measured_s=seconds)


def last_line(name: str) -> str:
    return (RESULTS / name).read_text().splitlines()[-1]


def json_lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


def test_a_shared_processor_holds_as_many_requests_as_theory_says() -> None:
    """M/G/1 with processor sharing: load / (1 - load) on average, whatever the lengths."""
    outcome = run(PLAIN)
    assert outcome.turns == pytest.approx(5_000, rel=0.05)
    assert statistics.fmean(outcome.running) == pytest.approx(1.0, rel=0.15)
    assert max(outcome.waits_s) == 0.0


def test_who_finds_no_slot_waits_in_order_and_the_mean_is_that_of_theory() -> None:
    """M/D/1 with one slot: load / (1 - load) / 2 turns' time of waiting."""
    outcome = run(dataclasses.replace(PLAIN, slots=1))
    assert statistics.fmean(outcome.waits_s) == pytest.approx(0.25, rel=0.15)
    assert max(outcome.running) == 1


def test_more_servers_carry_more_turns_alike() -> None:
    one, four = run(PLAIN, seconds=2_000), run(PLAIN, servers=4, rate=4.0, seconds=2_000)
    assert four.turns == pytest.approx(4 * one.turns, rel=0.05)
    assert statistics.fmean(four.first_tokens_s) == pytest.approx(statistics.fmean(one.first_tokens_s), rel=0.2)


def test_the_same_seed_gives_the_same_outcome_and_another_one_another() -> None:
    first = run(PLAIN, seconds=200)
    assert run(PLAIN, seconds=200) == first
    assert run(PLAIN, seconds=200, seed=1) != first


def test_a_later_turn_brings_what_is_new_and_comes_after_its_pause() -> None:
    rows = [TraceRow(0.0, 100, 20, 7), TraceRow(5.0, 30, 10, 8), TraceRow(60.0, 150, 5, 7)]
    assert conversations_of(rows) == [[TurnSize(100, 20, 0.0), TurnSize(30, 5, 60.0)], [TurnSize(30, 10, 0.0)]]
    # one conversation at a time, far apart: its second turn is alone on the server too
    fleet = Fleet([*rows[::2], TraceRow(90.0, 100, 20, 7)], PLAIN, servers=1, turn_rate=0.003, seed=0)
    outcome = fleet.run(warm_up_s=0.0, measured_s=5_000)
    assert {round(time_s, 3) for time_s in outcome.first_tokens_s} == {1.0, 0.3, 0.01}


def test_speed_is_what_was_measured_and_between_it_a_straight_line() -> None:
    speed = dataclasses.replace(PLAIN, decode=((1, 100.0), (3, 200.0)))
    assert [round(n * speed.tokens_per_s(n)) for n in (1, 2, 3, 30)] == [100, 150, 200, 200]
    slowed = dataclasses.replace(speed, token_s=0.01)
    assert slowed.tokens_per_s(1) == pytest.approx(50.0)
    assert slowed.alone_s(TurnSize(50, 10, 0.0)) == pytest.approx(0.5 + 10 * (0.005 + 0.01))


def test_time_goes_on_where_a_rest_of_a_token_takes_less_than_the_clock_can_tell() -> None:
    fast = dataclasses.replace(PLAIN, read=1e6, decode=((1, 1e6),))
    assert run(fast, rate=0.01, seconds=20_000.0).turns == pytest.approx(200, rel=0.3)


def test_percentiles() -> None:
    assert [percentile([3, 1, 2, 4], p) for p in (25, 50, 99, 100)] == [1, 2, 4, 4]


def test_the_fleet_that_is_found_keeps_the_objective_and_is_not_idle() -> None:
    goal = Goal(min_turns=200, warm_up_s=20.0, measured_s=60.0, max_servers=8)
    rows = poisson(1.0, 500, 25)
    tight = find_servers(rows, PLAIN, 4.0, 1.0, goal)
    loose = find_servers(rows, PLAIN, 4.0, 5.0, goal)
    assert tight.first_token_p95_s <= 1.0
    assert tight.servers > loose.servers >= 3  # 2 servers' time and a tenth
    assert tight.busy == pytest.approx((2.0 + 4.0 * tight.replayed / PLAIN.read) / tight.servers)


def test_memory_is_sessions_times_what_one_took() -> None:
    assert session_bytes("fp32", 2) == pytest.approx(3_780_616 * 3.42)
    assert memory_shards(10_000_000, "fp32", 2, 64) == 2_509
    assert memory_shards(10_000_000, "int8", 0, 64) == 272
    assert memory_shards(1, "int8", 0, 64) == 1


POLICY = Policy(limit=40, long=200, busy=300, idle_s=60.0, in_memory=1)
Step = tuple[str, float, int]  # a session's name, a time in seconds, and the tokens of its turn then


def moved(*steps: Step, policy: Policy = POLICY) -> tuple[float, ...]:
    """Snapshots loaded and stored, and tokens read again. Sessions are new; each comes once more, later."""
    states, found, later = States(policy), Moved(), [TurnSize(1, 1, 0.0)]
    sessions = {name: Session(later, Server(PLAIN, policy), 0.0) for name, _, _ in steps}
    for name, at_s, tokens in steps:
        states.take(sessions[name], at_s, found)
        states.put(sessions[name], TurnSize(tokens - 1, 1, 0.0), at_s, found)
    return dataclasses.astuple(found)


def test_states_become_snapshots_by_the_policy_of_servers() -> None:
    talk = [("a", float(at_s), 30) for at_s in range(10)]
    assert moved(*talk) == (1, 0, 0.0)  # in memory, and never idle
    assert moved(*talk, ("a", 10.0, 30)) == (1, 1, 0.0)  # busy: more than 300 tokens
    assert moved(("a", 0.0, 201)) == (1, 1, 0.0)  # a long turn
    assert moved(("a", 0.0, 41), ("a", 61.0, 1)) == (1, 1, 0.0)  # idle
    assert moved(("a", 0.0, 40), ("a", 61.0, 1)) == (1, 0, 0.0)
    assert moved(("a", 0.0, 41), ("b", 1.0, 1), ("a", 2.0, 1)) == (3, 1, 0.0)  # its state left the memory
    assert moved(("a", 0.0, 40), ("b", 1.0, 1), ("a", 2.0, 1)) == (3, 1, 40.0)  # and was read again
    assert moved(*talk, policy=dataclasses.replace(POLICY, limit=0)) == (10, 10, 0.0)


def test_the_policy_is_that_of_a_server_with_default_settings() -> None:
    core, gpu = (policy_of(SPEEDS[name], "fp32") for name in ("cpu core", "h200"))
    assert (core.limit, core.long, core.busy) == (152, 2_953, 42_006)
    assert (gpu.limit, gpu.long, gpu.busy) == (4_096, 32_768, 42_006)
    assert policy_of(SPEEDS["h200"], "int8").limit == 0


def test_sizes_are_those_that_were_measured() -> None:
    text = (RESULTS / "state_dtype-cpu.txt").read_text()
    assert f"a raw state has {sizing.RAW_STATE_BYTES} bytes" in text
    for dtype in sizing.IN_REDIS:
        once = re.search(rf"^{dtype} +([\d.]+) +([\d.]+) +([\d.]+)$", text, re.MULTILINE)
        assert once is not None
        assert float(once[1]) == sizing.STORED[dtype]
        measured = re.findall(rf"^{dtype} +\d +[\d.]+ +([\d.]+)$", text, re.MULTILINE)
        assert tuple(map(float, measured)) == sizing.IN_REDIS[dtype]


def test_speeds_are_those_that_were_measured() -> None:
    (native,) = (one for one in json.loads(last_line("engine-cpu.txt"))["runs"] if one["executor"] == "native")
    rates = {row["what"]: row["tokens"] / row["cpu_ms"] * 1000 for row in native["rows"]}
    for count, rate in SPEEDS["cpu core"].decode:
        assert rate == pytest.approx(rates[f"decode 32 tokens, batch {count}"], abs=1.0)
    assert SPEEDS["cpu core"].read == pytest.approx(rates["read 8192 tokens"], abs=1.0)
    paced = re.search(r"^paced +sessions +this +([\d.]+)", (RESULTS / "gateway_cost-cpu.txt").read_text(), re.MULTILINE)
    assert paced is not None
    assert SPEEDS["cpu core"].token_s == pytest.approx(float(paced[1]) * 1e-6)
    reading = [line for line in json_lines("gpu_decode-h200.txt") if line.get("tokens") == 1_048_576]
    assert SPEEDS["h200"].read == pytest.approx(reading[-1]["tokens_per_s"], rel=0.01)
    steps = [line for line in json_lines("gpu_ahead-h200.txt") if line.get("temperature") == 0.0]
    best = {line["rows"]: max(line["tokens_per_s_waits"], line["tokens_per_s_ahead"]) for line in steps}
    assert SPEEDS["h200"].decode == tuple((rows, float(best[rows])) for rows in (1, 64, 512))


def test_the_results_are_those_of_today() -> None:
    """Small rows of benchmarks/results/sizing.txt; otherwise write it anew: `python -m benchmarks.sizing`."""
    stored = json.loads(last_line("sizing.txt"))
    assert stored["goal"] == dataclasses.asdict(Goal())
    for row in stored["rows"]:
        if row["sessions"] <= 100_000 and row["workload"] == "azure":
            assert sizing.size(row["workload"], row["machine"], row["sessions"], Goal()) == pytest.approx(row)


def test_the_page_shows_these_results() -> None:
    results = (RESULTS / "sizing.txt").read_text()
    page = (ROOT / "docs" / "sizing.md").read_text()
    memory = re.findall(r"^\| (fp32|fp16|int8) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    assert len(memory) == 3
    for dtype, *shown in memory:
        assert shown == re.findall(rf"^{dtype}, \d older +([\d.]+)", results, re.MULTILINE)
    fleets = re.findall(r"^\| ([\d,]+) \| ([\d.]+) \| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    assert len(fleets) == 4
    for column, machine in ((2, "cpu core"), (3, "h200")):
        (block,) = re.findall(rf"azure on servers of one {machine}; .*?\n\n", results, re.DOTALL)
        found = re.findall(r"^ *([\d,]+) +([\d.]+) +(\d+) ", block, re.MULTILINE)
        assert [(row[0], row[1], row[column]) for row in fleets] == found
