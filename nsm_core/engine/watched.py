"""The requests of an engine whose routing is told, and what is told of a step."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from nsm_core.engine.request import GenerationRequest
from nsm_core.engine.scheduler import Plan
from nsm_core.engine.sequence import RunningSequence
from nsm_core.errors import InvalidRequest
from nsm_core.inspection.probe import RoutingProbe
from nsm_core.inspection.routing import TokenRouting
from nsm_core.state.pool import StatePool

logger = logging.getLogger("nsm.engine")


class WatchedRequests:
    """Steps in which none of them takes part cost nothing but a look at a set."""

    def __init__(self, probe: RoutingProbe | None) -> None:
        """None: no request can be watched."""
        self._probe = probe
        self._slots: set[int] = set()

    def check(self, request: GenerationRequest) -> None:
        """Raises InvalidRequest for one that cannot be watched."""
        if self._probe is None or request.num_states is not None:
            by = "this engine" if self._probe is None else f"the model with {request.num_states} states"
            message = f"include_routing is not supported by {by}"
            raise InvalidRequest(message, param="include_routing", code="unsupported_parameter")

    def add(self, slot: int, sequence: RunningSequence) -> None:
        """A request that has got its slot; it is watched if it asks for that."""
        if sequence.request.include_routing:
            self._slots.add(slot)

    def remove(self, slot: int) -> None:
        """The request of this slot, watched or not, is over."""
        self._slots.discard(slot)

    def look(self, plan: Plan, running: Mapping[int, RunningSequence], pool: StatePool) -> dict[int, TokenRouting]:
        """Before a step: what will be done by the last token that each watched slot reads before it samples one.

        Empty where that fails.
        """
        if self._probe is None or not self._slots:
            return {}
        ids = {slot: running[slot].sampled[-1:] for slot in plan.decode if slot in self._slots}
        for chunk in plan.prefill:
            read_ids = running[chunk.slot].read_ids
            if chunk.slot in self._slots and chunk.start + chunk.length == len(read_ids):
                ids[chunk.slot] = list(read_ids[chunk.start :])
        if not ids:
            return {}
        slots = sorted(ids)
        try:
            layers = self._probe.look(pool.gather(slots), [ids[slot] for slot in slots])
        except Exception as error:  # the step itself does without: nobody's tokens are lost for a look at them
            logger.error("what the states do could not be told", exc_info=error)
            return {}
        return {
            slot: TokenRouting(position=running[slot].position, layers=found)
            for slot, found in zip(slots, layers, strict=True)
        }
