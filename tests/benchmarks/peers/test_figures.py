"""Ratios and verdicts, on figures that a test makes up."""

from __future__ import annotations

import pytest

from benchmarks.peers.figures import (
    LLAMA_CPP,
    OURS,
    OURS_INT4,
    OURS_INT4_HALF,
    RWKV7_KERNELS,
    Goal,
    add,
    goals,
    goodness,
    judge,
    paired,
)
from benchmarks.peers.report import report
from benchmarks.peers.streams import in_turn

DECODE = Goal(text="decoding", name="decode.8.tokens_per_cpu_s", at_least=2.0, peers=LLAMA_CPP)
RESUMED = Goal(text="resumed", name="session.9.resumed_ms", at_least=1.0, peers=("rwkv7",))
REREAD = Goal(
    text="to reading", name="session.9.resumed_ms", at_least=500.0, peers=(OURS,), peer_name="session.9.reread_ms"
)
SHARE = Goal(text="share", name="ceiling.1.share", at_least=0.6)


def taken() -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = {}
    for ours, llama, mamba in ((1000.0, 400.0, 500.0), (1100.0, 500.0, 610.0), (900.0, 450.0, 600.0)):
        add(found, OURS, {"decode.8.tokens_per_cpu_s": ours})
        add(found, "llama", {"decode.8.tokens_per_cpu_s": llama})
        add(found, "mamba2", {"decode.8.tokens_per_cpu_s": mamba})
    return found


def test_the_best_peer_counts_and_rounds_are_paired() -> None:
    (verdict,) = judge(taken(), [DECODE])
    assert (verdict.against, verdict.reached) == ("mamba2", 1000 / 600)
    assert (verdict.low, verdict.high) == (900 / 600, 1000 / 500)
    assert not verdict.is_met
    assert verdict.text == "missed by 17 %"


def test_less_is_better_for_times() -> None:
    found = {OURS: {"session.9.resumed_ms": [20.0], "session.9.reread_ms": [12_000.0]}, "rwkv7": {}}
    found["rwkv7"]["session.9.resumed_ms"] = [60.0]
    resumed, again = judge(found, [RESUMED, REREAD])
    assert (resumed.reached, resumed.text) == (3.0, "met")
    assert (again.against, again.reached, again.text) == (OURS, 600.0, "met")


def test_rwkv7_is_held_against_the_same_architecture() -> None:
    wanted = [
        goal for goal in goals(batches=[8], lengths=[512], context=9, clients=[], session=9) if goal.subject != OURS
    ]
    found = {
        RWKV7_KERNELS: {"decode.8.tokens_per_cpu_s": [1500.0], "prefill.512.tokens_per_cpu_s": [3000.0]},
        "rwkv7": {"decode.8.tokens_per_cpu_s": [500.0], "prefill.512.tokens_per_cpu_s": [2000.0]},
        "llama": {"decode.8.tokens_per_cpu_s": [9000.0], "prefill.512.tokens_per_cpu_s": [9000.0]},
    }
    decode, prefill = judge(found, wanted)
    assert (decode.against, decode.reached, decode.text) == ("rwkv7", 3.0, "met")
    assert (prefill.against, prefill.reached, prefill.text) == ("rwkv7", 1.5, "missed by 25 %")


def test_streams_of_classes_with_4_bits_are_held_against_the_best_of_all_files() -> None:
    wanted = goals(batches=[], lengths=[], context=9, clients=[1, 8], session=9)
    name = "stream.8.tokens_per_cpu_s"
    found = {
        OURS: {name: [5000.0], "turns.16.session_cpu_ms": [18.0], "turns.16.stateless_cpu_ms": [12.0]},
        OURS_INT4: {name: [3300.0]},
        OURS_INT4_HALF: {name: [3200.0]},
        "llama": {name: [500.0]},
        "llama-q4_0": {name: [1000.0]},
    }
    turn, whole, half = sorted(judge(found, wanted), key=lambda verdict: verdict.goal.text)
    assert (turn.reached, turn.text) == (12 / 18, "missed by 20 %")
    assert (whole.against, whole.goal.subject, whole.text) == ("llama-q4_0", OURS_INT4, "met")
    assert (half.goal.subject, half.is_met) == (OURS_INT4_HALF, False)


def test_a_share_stands_by_itself() -> None:
    (verdict,) = judge({OURS: {"ceiling.1.share": [0.5, 0.54, 0.7]}}, [SHARE])
    assert (verdict.reached, verdict.against, verdict.text) == (0.54, None, "missed by 10 %")


def test_what_was_not_measured_is_not_judged() -> None:
    assert judge({OURS: {"decode.8.tokens_per_cpu_s": [1.0]}}, [DECODE, SHARE]) == []
    assert judge({"llama": {"decode.8.tokens_per_cpu_s": [1.0]}}, [DECODE]) == []


@pytest.mark.parametrize(
    ("name", "ours", "theirs", "ratio"),
    [("decode.1.tokens_per_cpu_s", 300.0, 200.0, 1.5), ("stream.1.ttft_p50_ms", 20.0, 50.0, 2.5)],
)
def test_goodness(name: str, ours: float, theirs: float, ratio: float) -> None:
    assert goodness(name, ours, theirs) == ratio


def test_values_of_unequal_number_meet_the_median() -> None:
    assert paired([1.0, 2.0, 6.0], [4.0]) == [(1.0, 4.0), (2.0, 4.0), (6.0, 4.0)]
    assert paired([4.0], [1.0, 2.0]) == [(4.0, 1.0), (4.0, 2.0)]


def test_goals_are_of_what_is_measured() -> None:
    sizes = {"lengths": [512], "context": 64, "session": 128}
    names = [goal.name for goal in goals(batches=[1, 3], clients=[2], **sizes)]
    assert "decode.1.tokens_per_cpu_s" in names
    assert not {"decode.3.tokens_per_cpu_s", "decode.8.tokens_per_cpu_s", "stream.32.tokens_per_cpu_s"} & {*names}
    assert {"context.64.tokens_per_cpu_s", "prefill.512.tokens_per_cpu_s", "session.128.resumed_ms"} <= {*names}


def test_each_is_first_in_its_turn() -> None:
    assert [in_turn("abc", number)[0] for number in range(4)] == ["a", "b", "c", "a"]
    assert in_turn("abc", 2) == ["c", "a", "b"]


def test_the_report_shows_figures_and_verdicts() -> None:
    result = {
        "command": "python -m benchmarks.peers",
        "machine": {"cpu": "a processor", "num_cpus": 2, "load": 0.5},
        "commit": "abc",
        "created": "now",
        "took_s": 3,
        "threads": 2,
        "taken": taken(),
    }
    lines = report(result, judge(taken(), [DECODE])).splitlines()
    assert lines[0] == "$ python -m benchmarks.peers"
    assert "servers with 2 threads each, engines with one" in lines[2]
    (figures,) = (line.split() for line in lines if line.startswith("decode.8"))
    assert figures == ["decode.8.tokens_per_cpu_s", "1,000", "450", "600"]
    assert lines[-1].split() == ["decoding", "mamba2", "2", "1.67", "1.5", "-", "2", "missed", "by", "17", "%"]
