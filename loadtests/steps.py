"""A profile's open loop as a plan: which step lasts how long, at which rate, and what arrives in it."""

from __future__ import annotations

from loadtests.arrivals import TRACES, Arrival, plan_arrivals, read_trace
from loadtests.errors import RunError
from loadtests.run_profile import OpenLoop, Profile

EXTRACTS = {"azure": "azure-conv-2023.csv", "mooncake": "mooncake-conversation.jsonl.zst"}


def step_name(loop: OpenLoop, index: int) -> str:
    """The index makes a rate that comes twice two steps: "1: 0.5x", "2: 10x", "3: 0.5x"."""
    return f"{index + 1}: {loop.rates[index]:g}{'/s' if loop.unit == 'per_s' else 'x'}"


def steps_of(loop: OpenLoop, capacity: float) -> list[tuple[str, float, float]]:
    """(name, requests a second, seconds) of each. Raises RunError when a capacity is needed and there is none."""
    if loop.unit == "capacity" and capacity <= 0:
        raise RunError("--capacity: the rates are multiples of it, and it was not given")
    factor = capacity if loop.unit == "capacity" else 1.0
    return [(step_name(loop, index), rate * factor, loop.step_s) for index, rate in enumerate(loop.rates)]


def arrivals_of(profile: Profile, loop: OpenLoop, capacity: float) -> list[Arrival]:
    """All arrivals of a run, the same in every process."""
    rows = read_trace(loop.trace_file or TRACES / EXTRACTS[loop.trace])
    return plan_arrivals(
        rows,
        steps_of(loop, capacity),
        pause_s=loop.pause_s,
        length_scale=loop.length_scale,
        max_output=profile.texts.max_tokens,
    )
