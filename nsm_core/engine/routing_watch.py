"""The requests of an engine whose routing is told, and what is told of a step."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from nsm_core.engine.request import GenerationRequest
from nsm_core.engine.scheduler import Plan
from nsm_core.engine.sequence import RunningSequence
from nsm_core.errors import InvalidRequest
from nsm_core.inspection.probe import RoutingProbe
from nsm_core.inspection.routing import LayerRouting, TokenRouting
from nsm_core.state.pool import StatePool

logger = logging.getLogger("nsm.engine")

# After a look, while others run, no look is taken for so many times as long as it took: a quarter of the time at most.
REST_AFTER_LOOK = 3.0


class WatchedRequests:
    """Steps in which none of them takes part cost nothing but a look at a set."""

    def __init__(self, probe: RoutingProbe | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Without a probe no request is watched."""
        self._probe = probe
        self._slots: dict[int, int] = {}  # with the length of the prompt; the one looked at last at the end
        self._clock = clock
        self._rests_until = float("-inf")

    def check(self, request: GenerationRequest) -> None:
        """Raises InvalidRequest for one that cannot be watched."""
        if self._probe is None:
            message = "include_routing is not supported by this engine"
            raise InvalidRequest(message, param="include_routing", code="unsupported_parameter")

    def add(self, slot: int, sequence: RunningSequence) -> None:
        """A request that has got its slot; it is watched if it asks for that."""
        if sequence.request.include_routing:
            self._slots[slot] = len(sequence.read_ids)

    def remove(self, slot: int) -> None:
        """The request of this slot, watched or not, is over."""
        self._slots.pop(slot, None)

    def put_off(self, plan: Plan, sequences: Mapping[str, RunningSequence]) -> Plan:
        """The plan, in which those who are not watched never wait long for looks at those who are.

        Where both would run, at most one look is taken in a step, in turns, and none for a while after one; the other
        watched requests sit the step out. `sequences`: by request id.
        """
        opened = {admission.slot: sequences[admission.request_id] for admission in plan.admitted}
        watched = self._slots | {
            slot: len(sequence.read_ids) for slot, sequence in opened.items() if sequence.request.include_routing
        }
        if not watched or watched.keys() >= {*plan.decode, *(chunk.slot for chunk in plan.prefill)}:
            return plan
        would_look = set(plan.decode) & watched.keys()
        would_look |= {chunk.slot for chunk in plan.prefill if chunk.start + chunk.length == watched.get(chunk.slot)}
        sit_out = [slot for slot in watched if slot in would_look]
        if self._clock() >= self._rests_until:
            sit_out = sit_out[1:]
        return dataclasses.replace(
            plan,
            decode=tuple(slot for slot in plan.decode if slot not in sit_out),
            prefill=tuple(chunk for chunk in plan.prefill if chunk.slot not in sit_out),
        )

    def look(self, plan: Plan, running: Mapping[int, RunningSequence], pool: StatePool) -> dict[int, TokenRouting]:
        """Before a step: what will be done by the last token that each watched slot reads before it samples one.

        Where that fails nothing is told.
        """
        if not self._slots:
            return {}
        ids = {slot: running[slot].sampled[-1:] for slot in plan.decode if slot in self._slots}
        for chunk in plan.prefill:
            read_ids = running[chunk.slot].read_ids
            if chunk.slot in self._slots and chunk.start + chunk.length == len(read_ids):
                ids[chunk.slot] = list(read_ids[chunk.start :])
        return self._look(ids, running, pool) if ids else {}

    def _look(
        self, ids: Mapping[int, list[int]], running: Mapping[int, RunningSequence], pool: StatePool
    ) -> dict[int, TokenRouting]:
        started = self._clock()
        found: dict[int, TokenRouting] = {}
        try:
            if self._probe is not None:
                slots = sorted(ids)
                layers = self._probe.capture(pool.gather(slots), [ids[slot] for slot in slots])
                found = _told(slots, layers, running)
        except Exception as error:  # the step itself does without: nobody's tokens are lost for a look at them
            logger.error("what the states do could not be told", exc_info=error)
        ended = self._clock()
        self._rests_until = ended + REST_AFTER_LOOK * (ended - started)
        for slot in ids:
            self._slots[slot] = self._slots.pop(slot)
        return found


def _told(
    slots: Sequence[int], layers: Sequence[tuple[LayerRouting, ...]], running: Mapping[int, RunningSequence]
) -> dict[int, TokenRouting]:
    return {
        slot: TokenRouting(position=running[slot].position, layers=one) for slot, one in zip(slots, layers, strict=True)
    }
