"""Statistics of the engine's steps: counters, energy, samples of the model's states."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping

import torch

from nsm_core.energy.estimate import CORE_WATTS
from nsm_core.energy.factory import make_meter
from nsm_core.energy.ledger import READ_EVERY_S, EnergyLedger
from nsm_core.energy.meter import EnergyMeter
from nsm_core.engine.scheduler import Plan
from nsm_core.engine.sequence import RunningSequence
from nsm_core.model.observer import MAX_ROWS, ModelObserver
from nsm_core.state.pool import StatePool
from nsm_core.stats import EnergyUse, EngineStats


def meter_of(device: torch.device, *, core_watts: float = CORE_WATTS, num_engines: int = 1) -> EnergyMeter:
    """The meter of the GPU that a model is on, and of the CPUs. `core_watts`: of one busy core, for an estimate.
    `num_engines`: of one server on this machine.
    """
    uuids = [str(torch.cuda.get_device_properties(device).uuid)] if device.type == "cuda" else []
    return make_meter(gpu_uuids=uuids, core_watts=core_watts, num_engines=num_engines)


class StepStats:
    """The engine's counters, the energy of its requests, and samples of the model's states.

    `counters` may be changed by other parts of the engine. Without a meter there is no energy, without an observer no
    samples.
    """

    def __init__(self, counters: EngineStats, *, meter: EnergyMeter | None, observer: ModelObserver | None) -> None:
        self.counters = counters
        self._ledger = None if meter is None else EnergyLedger(meter)
        self._observer = observer
        self._alike_slots: tuple[int, ...] = ()  # of the last steps, which are not charged yet
        self._alike_ids: list[str] = []
        self._alike_seconds = self._alike_since = 0.0

    @property
    def is_sample_due(self) -> bool:
        """Whether the next decoding step is to be sampled; its token ids must be on the host."""
        return self._observer is not None and self._observer.is_due

    def begin(
        self, plan: Plan, running: Mapping[int, RunningSequence], pool: StatePool, *, may_sample: bool = True
    ) -> None:
        """Before a step."""
        if self._ledger is not None:
            self._ledger.begin()
        if self._observer is not None and plan.decode and may_sample and self._observer.is_due:
            self._sample(self._observer, plan, running, pool)

    def record(
        self,
        plan: Plan,
        running: Mapping[int, RunningSequence],
        seconds: float,
        num_read: Mapping[int, int],
        *,
        num_rounds: int = 1,
        num_decoded: Mapping[int, int] | None = None,
    ) -> None:
        """After a step of `seconds`, before any of its requests ends. `num_read`: tokens read by each decoding slot
        that read more than one. `num_rounds`: of a slice or a launch, which counts as so many steps. `num_decoded`: the
        tokens of each slot of a launch, where some took no part in a round.
        """
        num_skipped = 0 if num_decoded is None else num_rounds * len(num_decoded) - sum(num_decoded.values())
        self.counters.num_steps += num_rounds
        self.counters.step_rows += num_rounds * (len(plan.decode) + len(plan.prefill)) - num_skipped
        self.counters.step_tokens += num_rounds * plan.num_tokens + sum(num_read.values()) - len(num_read) - num_skipped
        self.counters.tokens_computed += sum(chunk.length for chunk in plan.prefill)
        if self._ledger is None:
            return
        if num_read or plan.prefill or num_skipped:
            self._charge_alike()
            of_slot = num_decoded or num_read
            tokens = {running[slot].request.request_id: of_slot.get(slot, 1) for slot in plan.decode}
            tokens |= {running[chunk.slot].request.request_id: chunk.length for chunk in plan.prefill}
            self._ledger.work(tokens, seconds, now=time.monotonic())
        else:
            self._gather_alike(plan.decode, running, seconds)

    def _gather_alike(self, slots: tuple[int, ...], running: Mapping[int, RunningSequence], seconds: float) -> None:
        """A step in which each slot read one token. A slot gets another request only by a step with a prompt, so
        successive steps of the same slots are charged together.
        """
        now = time.monotonic()
        if self._alike_slots != slots or now - self._alike_since >= READ_EVERY_S:
            self._charge_alike()
            self._alike_slots, self._alike_since = slots, now
            self._alike_ids = [running[slot].request.request_id for slot in slots]
        self._alike_seconds += seconds

    def _charge_alike(self) -> None:
        if self._ledger is not None and self._alike_seconds:
            self._ledger.work(dict.fromkeys(self._alike_ids, 1), self._alike_seconds, now=time.monotonic())
        self._alike_seconds, self._alike_slots = 0.0, ()

    def record_share(self, plan: Plan, slot: int, request_id: str, seconds: float) -> None:
        """The slot's request ends while the step of `plan` is in flight, `seconds` after its start."""
        self._charge_alike()
        if self._ledger is not None:
            num_tokens = next((chunk.length for chunk in plan.prefill if chunk.slot == slot), 1)
            self._ledger.work({request_id: num_tokens}, seconds * num_tokens / plan.num_tokens, now=time.monotonic())

    def record_drafts(self, *, num_drafted: int, num_accepted: int) -> None:
        """The drafts of one request in one step."""
        self.counters.num_drafts += 1
        self.counters.num_draft_tokens += num_drafted
        self.counters.num_accepted_tokens += num_accepted

    def idle(self) -> None:
        """No request is active."""
        self._charge_alike()
        if self._ledger is not None:
            self._ledger.rest()

    def take_energy(self, request_id: str) -> tuple[EnergyUse, ...]:
        """The energy charged to a request that ends."""
        self._charge_alike()
        return () if self._ledger is None else self._ledger.close_account(request_id)

    def snapshot(self) -> EngineStats:
        """A copy of all figures."""
        stats = dataclasses.replace(self.counters)
        if self._ledger is not None:
            stats.energy, stats.request_energy = self._ledger.total, self._ledger.charged
        if self._observer is not None:
            stats.num_observed, stats.layers = self._observer.num_observed, self._observer.layers
        return stats

    def _sample(
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
            self.counters.device_memory_bytes = torch.cuda.memory_allocated(device)
