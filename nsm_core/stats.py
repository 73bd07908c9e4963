"""The engine's figures as plain numbers, for metrics."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

# What the energy went through, and how it is known: see docs/energy.md
Source = Literal["gpu", "cpu", "dram"]
Method = Literal["nvml", "nvml_power", "rapl", "estimate"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EnergyUse:
    """Joules of one source, by one method."""

    source: Source
    method: Method
    joules: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerStats:
    """What one layer with routed slots did with the tokens that were sampled last; the counters count in samples only.

    `layer`: its number, and behind a dot that of one of several mixers in it. Shares are in [0, 1]. `entropy`: of a
    token's write weights over the slots of a head, 1 where all are equal; `sparsity`: share of slots with a write
    weight below a thousandth; `states_per_token`: exp of that entropy, in slots; `openness`: mean write weight;
    `utilisation`: share of slots that are not where they started. `num_active`: slots of a head that are in use, on
    average; all of them in a layer that neither allocates nor prunes.
    """

    layer: str
    entropy: float
    sparsity: float
    states_per_token: float
    openness: float
    utilisation: float
    num_active: float = 0.0
    num_allocated: int = 0  # counter: slots that came into use; without allocation: that left their start
    num_pruned: int = 0  # counter: slots that went out of use; without allocation: that were put back to it


@dataclasses.dataclass(slots=True, kw_only=True)
class EngineStats:
    """Counters rise for ever; gauges say what holds now."""

    num_running: int = 0  # gauge: requests that hold a slot
    num_waiting: int = 0  # gauge: requests in the queue
    max_slots: int = 0  # gauge: rows of the state pool
    state_pool_bytes: int = 0  # gauge
    device_memory_bytes: int = 0  # gauge: of an accelerator, allocated by this process; 0 without one
    num_steps: int = 0  # counter
    num_failed_steps: int = 0  # counter: steps that raised, and ended their requests
    step_seconds: float = 0.0  # counter
    num_slow_steps: int = dataclasses.field(default=0, compare=False)  # counter: steps above SLOW_STEP_S
    heartbeat_age_s: float = dataclasses.field(default=0.0, compare=False)  # gauge: since its thread began a turn
    step_rows: int = 0  # counter: requests that a step advanced, over all steps
    step_tokens: int = 0  # counter: tokens that the model read, over all steps
    tokens_computed: int = 0  # counter: prompt tokens the model read
    tokens_resumed: int = 0  # counter: prompt tokens covered by a resumed state
    tokens_generated: int = 0  # counter
    num_drafts: int = 0  # counter: times that tokens were drafted for a request
    num_draft_tokens: int = 0  # counter: tokens of these
    num_accepted_tokens: int = 0  # counter: of these, what became output
    num_observed: int = 0  # counter: tokens that `layers` was made of
    layers: tuple[LayerStats, ...] = ()
    energy: tuple[EnergyUse, ...] = ()  # counters: since the engine started
    request_energy: tuple[EnergyUse, ...] = ()  # counters: of that, what requests were charged

    @property
    def joules(self) -> float:
        """Of all sources together."""
        return math.fsum(use.joules for use in self.energy)

    def counters(self) -> EngineStats:
        """Without what holds now."""
        counted = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name not in _GAUGES
        }
        return EngineStats(**counted)

    def with_steps(self, now: EngineStats, *, since: EngineStats) -> EngineStats:
        """And the steps, and their energy, that another engine made between two of its own accounts."""
        summed = {name: getattr(self, name) + getattr(now, name) - getattr(since, name) for name in _OF_STEPS}
        used = tuple(dataclasses.replace(use, joules=-use.joules) for use in since.energy)
        energy = add_energy(add_energy(self.energy, now.energy), used)
        return dataclasses.replace(self, energy=energy, **summed)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> EngineStats:
        """The inverse of `dataclasses.asdict`, also after a way through JSON."""
        return cls(
            **{
                **fields,
                "layers": tuple(LayerStats(**layer) for layer in fields.get("layers", ())),
                "energy": tuple(EnergyUse(**use) for use in fields.get("energy", ())),
                "request_energy": tuple(EnergyUse(**use) for use in fields.get("request_energy", ())),
            }
        )


def add_stats(first: EngineStats, second: EngineStats) -> EngineStats:
    """Of two engines together. `layers`: of one that has some; the heartbeat is the older one."""
    summed = {
        field.name: getattr(first, field.name) + getattr(second, field.name)
        for field in dataclasses.fields(EngineStats)
        if field.name not in ("heartbeat_age_s", "layers", "energy", "request_energy")
    }
    return EngineStats(
        **summed,
        heartbeat_age_s=max(first.heartbeat_age_s, second.heartbeat_age_s),
        layers=first.layers or second.layers,
        energy=add_energy(first.energy, second.energy),
        request_energy=add_energy(first.request_energy, second.request_energy),
    )


_GAUGES = (
    "num_running",
    "num_waiting",
    "max_slots",
    "state_pool_bytes",
    "device_memory_bytes",
    "heartbeat_age_s",
    "layers",
)
_OF_STEPS = ("num_steps", "num_slow_steps", "step_seconds", "step_rows", "step_tokens")


def add_energy(first: tuple[EnergyUse, ...], second: tuple[EnergyUse, ...]) -> tuple[EnergyUse, ...]:
    """Source by source, method by method."""
    joules: dict[tuple[Source, Method], float] = {}
    for use in (*first, *second):
        joules[use.source, use.method] = joules.get((use.source, use.method), 0.0) + use.joules
    return tuple(EnergyUse(source=key[0], method=key[1], joules=value) for key, value in joules.items())


@dataclasses.dataclass(slots=True, kw_only=True)
class StateCacheStats:
    """Of the states that a worker keeps for the next turn."""

    num_states: int = 0  # gauge
    num_bytes: int = 0  # gauge
    max_bytes: int = 0  # gauge
    num_hits: int = 0  # counter: asked for by id, and there
    num_misses: int = 0  # counter: asked for by id, and not there
    num_evicted: int = 0  # counter: given up for newer ones
