"""What an engine's steps have cost and shown: counters, energy, a look at the model now and then."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping

import torch
from torch import nn

from nsm_core.energy.estimate import CORE_WATTS
from nsm_core.energy.factory import make_meter
from nsm_core.energy.ledger import EnergyLedger
from nsm_core.energy.meter import EnergyMeter
from nsm_core.engine.scheduler import Plan
from nsm_core.engine.sequence import RunningSequence
from nsm_core.model.observer import MAX_ROWS, ModelObserver
from nsm_core.state.pool import StatePool
from nsm_core.stats import EnergyUse, EngineStats


def meter_of(model: nn.Module, *, core_watts: float = CORE_WATTS) -> EnergyMeter:
    """`core_watts`: of one busy core, for an estimate where nothing is measured."""
    device = next(model.parameters()).device
    uuids = [str(torch.cuda.get_device_properties(device).uuid)] if device.type == "cuda" else []
    return make_meter(gpu_uuids=uuids, core_watts=core_watts)


class Accounts:
    """Of one engine, told by it before and after each step. Without a meter or an observer it has none of theirs."""

    def __init__(self, stats: EngineStats, *, meter: EnergyMeter | None, observer: ModelObserver | None) -> None:
        self.counted = stats
        self._ledger = None if meter is None else EnergyLedger(meter)
        self._observer = observer

    @property
    def is_look_due(self) -> bool:
        """Whether the next step that decodes is to be looked at; its ids must be known."""
        return self._observer is not None and self._observer.is_due

    def begin(
        self, plan: Plan, running: Mapping[int, RunningSequence], pool: StatePool, *, may_look: bool = True
    ) -> None:
        """Before a step."""
        if self._ledger is not None:
            self._ledger.begin()
        if self._observer is not None and plan.decode and may_look and self._observer.is_due:
            self._observe(self._observer, plan, running, pool)

    def charge(
        self, plan: Plan, running: Mapping[int, RunningSequence], seconds: float, num_read: Mapping[int, int]
    ) -> None:
        """After a step of `seconds`, while its requests are still there. `num_read`: tokens that decoding slots have
        read, of those that read more than one.
        """
        self.counted.num_steps += 1
        self.counted.step_rows += len(plan.decode) + len(plan.prefill)
        self.counted.step_tokens += plan.num_tokens + sum(num_read.values()) - len(num_read)
        self.counted.tokens_computed += sum(chunk.length for chunk in plan.prefill)
        if self._ledger is not None:
            tokens = {running[slot].request.request_id: num_read.get(slot, 1) for slot in plan.decode}
            tokens |= {running[chunk.slot].request.request_id: chunk.length for chunk in plan.prefill}
            self._ledger.work(tokens, seconds, now=time.monotonic())

    def charge_share(self, plan: Plan, slot: int, request_id: str, seconds: float) -> None:
        """The request of this slot ends while a step is in flight that has taken `seconds` so far."""
        if self._ledger is not None:
            num_tokens = next((chunk.length for chunk in plan.prefill if chunk.slot == slot), 1)
            self._ledger.work({request_id: num_tokens}, seconds * num_tokens / plan.num_tokens, now=time.monotonic())

    def count_drafts(self, *, num_drafted: int, num_accepted: int) -> None:
        """Of one request in one step."""
        self.counted.num_drafts += 1
        self.counted.num_draft_tokens += num_drafted
        self.counted.num_accepted_tokens += num_accepted

    def rest(self) -> None:
        """Nothing is to be done for now."""
        if self._ledger is not None:
            self._ledger.rest()

    def close(self, request_id: str) -> tuple[EnergyUse, ...]:
        """The request is over; what it has used."""
        return () if self._ledger is None else self._ledger.close_account(request_id)

    def stats(self) -> EngineStats:
        """A copy."""
        stats = dataclasses.replace(self.counted)
        if self._ledger is not None:
            stats.energy, stats.request_energy = self._ledger.total, self._ledger.charged
        if self._observer is not None:
            stats.num_observed, stats.layers = self._observer.num_observed, self._observer.layers
        return stats

    def _observe(
        self, observer: ModelObserver, plan: Plan, running: Mapping[int, RunningSequence], pool: StatePool
    ) -> None:
        slots = plan.decode[:MAX_ROWS]
        sequences = [running[slot] for slot in slots]
        state = pool.gather(slots)
        observer.observe(
            [sequence.request.request_id for sequence in sequences],
            is_fresh=[sequence.request.resume is None for sequence in sequences],
            ids=[sequence.unread[0] for sequence in sequences],
            state=state,
        )
        device = next(iter(state.values())).device
        if device.type == "cuda":
            self.counted.device_memory_bytes = torch.cuda.memory_allocated(device)
