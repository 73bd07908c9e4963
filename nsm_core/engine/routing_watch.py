"""Routing capture for the requests that ask for it, at most a quarter of the engine's time while others run."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from nsm_core.engine.scheduler import Plan
from nsm_core.engine.sequence import RunningSequence
from nsm_core.errors import InvalidRequest
from nsm_core.inspection.probe import RoutingProbe
from nsm_core.inspection.routing import LayerRouting, TokenRouting
from nsm_core.state.pool import StatePool

logger = logging.getLogger("nsm.engine")

# While other requests run, the pause after a capture is this many times its duration.
PAUSE_PER_CAPTURE = 3.0


class RoutingWatch:
    """The running requests with `include_routing`. A SlotListener. Steps without such requests pay one lookup."""

    def __init__(self, probe: RoutingProbe | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`probe`: None for a model without memory slots, whose requests for routing are refused."""
        self._probe = probe
        self._slots: dict[int, int] = {}  # with the length of the text to read; the last captured slot is last
        self._clock = clock
        self._paused_until = float("-inf")

    def check(self) -> None:
        """Raises InvalidRequest if routing cannot be captured."""
        if self._probe is None:
            message = "include_routing is not supported: this model routes no tokens to memory slots"
            raise InvalidRequest(message, param="include_routing", code="unsupported_parameter")

    def open(self, slot: int, sequence: RunningSequence) -> None:
        if sequence.request.include_routing:
            self._slots[slot] = len(sequence.read_ids)

    def close(self, slot: int) -> None:
        self._slots.pop(slot, None)

    def defer(self, plan: Plan, sequences: Mapping[str, RunningSequence]) -> Plan:
        """The plan without the captures that would delay other requests. `sequences`: by request id.

        Beside other requests a step captures at most one request, in turns, and none during the pause after a capture.
        The other watched requests skip the step.
        """
        admitted = {assignment.slot: sequences[assignment.request_id] for assignment in plan.admitted}
        watched = self._slots | {
            slot: len(sequence.read_ids) for slot, sequence in admitted.items() if sequence.request.include_routing
        }
        if not watched or watched.keys() >= {*plan.decode, *(chunk.slot for chunk in plan.prefill)}:
            return plan
        due = set(plan.decode) & watched.keys()
        due |= {chunk.slot for chunk in plan.prefill if chunk.start + chunk.length == watched.get(chunk.slot)}
        deferred = [slot for slot in watched if slot in due]
        if self._clock() >= self._paused_until:
            deferred = deferred[1:]
        return dataclasses.replace(
            plan,
            decode=tuple(slot for slot in plan.decode if slot not in deferred),
            prefill=tuple(chunk for chunk in plan.prefill if chunk.slot not in deferred),
        )

    def capture(self, plan: Plan, running: Mapping[int, RunningSequence], pool: StatePool) -> dict[int, TokenRouting]:
        """Before a step: the routing of the last token that each watched slot reads before it samples one.

        Empty if the capture fails.
        """
        if not self._slots:
            return {}
        ids = {slot: running[slot].sampled[-1:] for slot in plan.decode if slot in self._slots}
        for chunk in plan.prefill:
            read_ids = running[chunk.slot].read_ids
            if chunk.slot in self._slots and chunk.start + chunk.length == len(read_ids):
                ids[chunk.slot] = list(read_ids[chunk.start :])
        return self._capture(ids, running, pool) if ids else {}

    def _capture(
        self, ids: Mapping[int, list[int]], running: Mapping[int, RunningSequence], pool: StatePool
    ) -> dict[int, TokenRouting]:
        started = self._clock()
        found: dict[int, TokenRouting] = {}
        try:
            if self._probe is not None:
                slots = sorted(ids)
                layers = self._probe.capture(pool.gather(slots), [ids[slot] for slot in slots])
                found = _by_slot(slots, layers, running)
        except Exception as error:  # the step continues without routing: no token is lost
            logger.error("routing could not be captured", exc_info=error)
        ended = self._clock()
        self._paused_until = ended + PAUSE_PER_CAPTURE * (ended - started)
        for slot in ids:
            self._slots[slot] = self._slots.pop(slot)
        return found


def _by_slot(
    slots: Sequence[int], layers: Sequence[tuple[LayerRouting, ...]], running: Mapping[int, RunningSequence]
) -> dict[int, TokenRouting]:
    return {
        slot: TokenRouting(position=running[slot].position, layers=one) for slot, one in zip(slots, layers, strict=True)
    }
