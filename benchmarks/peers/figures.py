"""Figures by subject and name, ratios between subjects, and the goals that they are held against."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence

from benchmarks.peers.models import QUANTISED

OURS, KERNELS, RWKV7_KERNELS = "ours", "our kernels", "our rwkv7"
OURS_INT4, KERNELS_INT4 = "ours int4", "kernels int4"
OURS_INT4_HALF = "int4 fp16"  # int4 weights, running states in fp16
EIGHT_BITS = ("llama", "rwkv7", "mamba2")
LLAMA_CPP = (*EIGHT_BITS, *QUANTISED)
Figures = dict[str, float]  # a name is what.size.figure; `_ms` is better when less, all else when more
Taken = dict[str, dict[str, list[float]]]  # subject: name: a value for each round


def add(taken: Taken, subject: str, figures: Mapping[str, float]) -> None:
    for name, value in figures.items():
        taken.setdefault(subject, {}).setdefault(name, []).append(value)


def is_less_better(name: str) -> bool:
    return name.endswith("_ms")


def goodness(name: str, ours: float, theirs: float) -> float:
    """How many times as good ours is: 2.0 is twice as fast, or half as long."""
    return theirs / ours if is_less_better(name) else ours / theirs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """`at_least`: of the ratio of ours to the best of `peers`, or of the figure itself where there are none.

    `peer_name`: the peers' figure, where it has another name than ours. `subject`: which of ours.
    """

    text: str
    name: str
    at_least: float
    peers: tuple[str, ...] = ()
    peer_name: str | None = None
    subject: str = OURS


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What was reached. `low`, `high`: over the rounds, each against what the peers did in the same one."""

    goal: Goal
    against: str | None
    reached: float
    low: float
    high: float

    @property
    def is_met(self) -> bool:
        return self.reached >= self.goal.at_least

    @property
    def text(self) -> str:
        missing = 100 * (1 - self.reached / self.goal.at_least)
        return "met" if self.is_met else f"missed by {missing:.0f} %"


def goals(
    *, batches: Sequence[int], lengths: Sequence[int], context: int, clients: Sequence[int], session: int
) -> list[Goal]:
    """The product's goals for what is measured: batches and clients for which none was set have none here."""
    found = [*_decoding_goals(batches)]
    found += _rwkv7_goals(batches, lengths)
    name = f"context.{context}.tokens_per_cpu_s"
    found.append(Goal(text=f"decoding after {context} tokens", name=name, at_least=8.0, peers=("llama",)))
    for length in lengths:
        name = f"prefill.{length}.tokens_per_cpu_s"
        found.append(Goal(text=f"reading {length} tokens", name=name, at_least=1.5, peers=EIGHT_BITS))
    if 32 in clients:
        name = "stream.32.tokens_per_cpu_s"
        found.append(Goal(text="HTTP, 32 clients", name=name, at_least=2.0, peers=EIGHT_BITS))
    found += _stream_goals(clients)
    found.append(
        Goal(
            text="16 of 60 sessions: a turn's CPU time, to none",
            name="turns.16.session_cpu_ms",
            at_least=1 / 1.2,
            peers=(OURS,),
            peer_name="turns.16.stateless_cpu_ms",
        )
    )
    at, resumed = f"session of {session} tokens", f"session.{session}.resumed_ms"
    again = f"session.{session}.reread_ms"
    found += [
        Goal(text=f"{at}: resumed, to a restored slot", name=resumed, at_least=1.0, peers=("rwkv7",)),
        Goal(text=f"{at}: resumed, to reading it again", name=resumed, at_least=500.0, peers=(OURS,), peer_name=again),
        Goal(text="share of the memory's rate, batch 1", name="ceiling.1.share", at_least=0.6),
        Goal(text="share of the rate of int8 products, batch 32", name="ceiling.32.share", at_least=0.6),
    ]
    return found


def _decoding_goals(batches: Sequence[int]) -> list[Goal]:
    """int8 against files of 8 bits, int4 against the best of all files."""
    found = []
    for batch, eight, four in ((1, 1.5, 1.5), (8, 2.0, 3.5), (32, 2.5, 2.8)):
        if batch in batches:
            name, text = f"decode.{batch}.tokens_per_cpu_s", f"decoding, batch {batch}"
            found.append(Goal(text=text, name=name, at_least=eight, peers=EIGHT_BITS))
            found += _four_bit_goals(text, name, four)
    return found


def _four_bit_goals(text: str, name: str, at_least: float) -> list[Goal]:
    """Both of our classes with weights in int4 against the best of all files."""
    subjects = {OURS_INT4: "int4", OURS_INT4_HALF: "int4, fp16 states"}
    return [
        Goal(text=f"{text}, {weights}", name=name, at_least=at_least, peers=LLAMA_CPP, subject=subject)
        for subject, weights in subjects.items()
    ]


def _stream_goals(clients: Sequence[int]) -> list[Goal]:
    found = []
    for number, at_least in ((1, 1.8), (8, 3.3), (32, 3.3)):
        if number in clients:
            found += _four_bit_goals(f"HTTP, {number} clients", f"stream.{number}.tokens_per_cpu_s", at_least)
    return found


def _rwkv7_goals(batches: Sequence[int], lengths: Sequence[int]) -> list[Goal]:
    """The same architecture from the same file, int8 against Q8_0."""
    wanted = {
        f"decode.{batch}": at_least for batch, at_least in ((1, 1.2), (8, 2.5), (32, 3.0)) if batch in batches
    } | {f"prefill.{length}": 2.0 for length in lengths}
    return [
        Goal(
            text=f"RWKV-7, {part.replace('.', ' ')}",
            name=f"{part}.tokens_per_cpu_s",
            at_least=at_least,
            peers=("rwkv7",),
            subject=RWKV7_KERNELS,
        )
        for part, at_least in wanted.items()
    ]


def judge(taken: Taken, wanted: Iterable[Goal]) -> list[Verdict]:
    """Of the goals whose figures were taken."""
    return [verdict for goal in wanted if (verdict := _verdict(taken, goal)) is not None]


def _verdict(taken: Taken, goal: Goal) -> Verdict | None:
    ours = taken.get(goal.subject, {}).get(goal.name)
    if ours is None:
        return None
    if not goal.peers:
        return Verdict(goal=goal, against=None, reached=statistics.median(ours), low=min(ours), high=max(ours))
    best = best_peer(taken, goal)
    if best is None:
        return None
    theirs = taken[best][goal.peer_name or goal.name]
    ratios = [goodness(goal.name, one, other) for one, other in paired(ours, theirs)]
    reached = goodness(goal.name, statistics.median(ours), statistics.median(theirs))
    return Verdict(goal=goal, against=best, reached=reached, low=min(ratios), high=max(ratios))


def best_peer(taken: Taken, goal: Goal) -> str | None:
    """The one with the best median; None where none was measured."""
    name = goal.peer_name or goal.name
    medians = {peer: statistics.median(taken[peer][name]) for peer in goal.peers if name in taken.get(peer, {})}
    if not medians:
        return None
    return (min if is_less_better(name) else max)(medians, key=lambda peer: medians[peer])


def paired(ours: Sequence[float], theirs: Sequence[float]) -> list[tuple[float, float]]:
    """Values of the same round; where the numbers of values differ, each with the median of the shorter side."""
    if len(ours) == len(theirs):
        return list(zip(ours, theirs, strict=True))
    if len(ours) < len(theirs):
        return [(statistics.median(ours), other) for other in theirs]
    return [(one, statistics.median(theirs)) for one in ours]
