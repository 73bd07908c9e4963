"""The tables for people: every figure of every subject, then the goals."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.peers.figures import (
    KERNELS,
    KERNELS_INT4,
    LLAMA_CPP,
    OURS,
    OURS_INT4,
    OURS_INT4_HALF,
    RWKV7_KERNELS,
    Taken,
    Verdict,
)

SUBJECTS = (OURS, OURS_INT4, OURS_INT4_HALF, KERNELS, KERNELS_INT4, RWKV7_KERNELS, *LLAMA_CPP)


def report(result: Mapping[str, Any], verdicts: Sequence[Verdict]) -> str:
    """`result`: what the JSON says."""
    where = result["machine"]
    return "\n".join(
        [
            f"$ {result['command']}",
            f"{where['cpu']}, {where['num_cpus']} CPUs, load {where['load']:.1f} before; commit {result['commit']}, "
            f"{result['created']}, {result['took_s']} s",
            f"{threads_line(result)}; medians of the rounds; the peers' weights are random, of the same size",
            "",
            *figure_lines(result["taken"]),
            "",
            *goal_lines(verdicts),
        ]
    )


def threads_line(result: Mapping[str, Any]) -> str:
    threads = result["threads"]
    return "one thread each" if threads == 1 else f"servers with {threads} threads each, engines with one"


def figure_lines(taken: Taken) -> list[str]:
    subjects = [subject for subject in SUBJECTS if subject in taken]
    names = list(dict.fromkeys(name for subject in subjects for name in taken[subject]))
    lines = [f"{'':<36}" + "".join(f"{subject:>13}" for subject in subjects)]
    for name in names:
        cells = [short(taken[subject].get(name)) for subject in subjects]
        lines.append(f"{name:<36}" + "".join(f"{cell:>13}" for cell in cells))
    return lines


def goal_lines(verdicts: Sequence[Verdict]) -> list[str]:
    lines = [f"{'goal':<52} {'against':<12} {'wanted':>8} {'reached':>8} {'rounds':>17}"]
    for verdict in verdicts:
        spread = f"{number(verdict.low)} - {number(verdict.high)}"
        lines.append(
            f"{verdict.goal.text:<52} {verdict.against or '':<12} {number(verdict.goal.at_least):>8} "
            f"{number(verdict.reached):>8} {spread:>17}  {verdict.text}"
        )
    return lines


def short(values: Sequence[float] | None) -> str:
    return "" if values is None else number(statistics.median(values))


def number(value: float) -> str:
    """Three digits at least."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
