"""Speculative decoding: which requests have tokens drafted for them, and which tokens. Plain Python.

A step reads a request's drafts in one call and samples after each; those that are what was sampled anyway are taken,
so a step gives several tokens of a request. The tokens are those of plain decoding: see `Executor.savepoint`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from nsm_core.config import EngineConfig
from nsm_core.engine.drafting import DraftPace, NgramDrafter
from nsm_core.engine.request import GenerationRequest
from nsm_core.engine.scheduler import Plan
from nsm_core.engine.sequence import RunningSequence

logger = logging.getLogger("nsm.engine")

# Drafts by slot; a slot without any is not in it.
Drafts = Mapping[int, Sequence[int]]
NO_DRAFTS: Drafts = MappingProxyType({})

# With more rows a step is bound by arithmetic, and a token more costs what it would in a step of its own.
MAX_ROWS = 4
# Text that a state has not read is read with the next drafts, and again when these are refused.
MAX_UNREAD = 8


def may_be_drafted(request: GenerationRequest) -> bool:
    """Greedy ones whose logits do not depend on the tokens sampled before: at higher temperatures few drafts come true.

    One that asks what the states do with each token needs a step for each.
    """
    return request.sampling.is_greedy and not request.sampling.has_penalties and not request.include_routing


class Speculation:
    """Of one engine."""

    def __init__(self, config: EngineConfig, *, is_possible: bool) -> None:
        """`is_possible`: whether the executor can take drafts back."""
        is_wanted = config.speculation == "lookup"
        self._is_on = is_wanted and is_possible
        if is_wanted and not is_possible:
            logger.debug("no tokens are drafted: with this executor they would not be those of plain decoding")
        self._token_budget = config.token_budget
        self._rows: dict[int, _Row] = {}

    def add(self, slot: int, sequence: RunningSequence) -> None:
        """A request that has got its slot."""
        if self._is_on and may_be_drafted(sequence.request):
            self._rows[slot] = _Row(sequence)

    def remove(self, slot: int) -> None:
        """The request of this slot, drafted for or not, is over."""
        self._rows.pop(slot, None)

    def propose(self, plan: Plan, running: Mapping[int, RunningSequence]) -> Drafts:
        """For the step of this plan. None beside prompts: then a token more takes the time of one of theirs."""
        if not self._rows or plan.prefill or len(plan.decode) > MAX_ROWS:
            return NO_DRAFTS
        drafts: dict[int, Sequence[int]] = {}
        room = self._token_budget - sum(len(running[slot].unread) for slot in plan.decode)
        for slot in plan.decode:
            found = self._rows[slot].propose(room) if slot in self._rows else ()
            if found:
                drafts[slot] = found
                room -= len(found)
        return drafts

    def tell(self, slot: int, *, num_drafted: int, num_accepted: int) -> None:
        """How a slot's drafts went; its tokens are taken."""
        row = self._rows.get(slot)
        if row is not None:
            row.tell(num_drafted=num_drafted, num_accepted=num_accepted)


class _Row:
    """One request. What its session held before is not looked through: the engine has no text of it."""

    def __init__(self, sequence: RunningSequence) -> None:
        self._sequence = sequence
        self._pace = DraftPace()
        self._drafter = NgramDrafter()
        self._num_given = 0  # sampled tokens that the drafter has

    def propose(self, room: int) -> Sequence[int]:
        """At most `room` tokens, and one fewer than may still be sampled: a last one is sampled after them."""
        sequence = self._sequence
        num_sampled = len(sequence.sampled)
        num_drafts = min(self._pace.num_drafts(num_sampled), room, sequence.params.max_tokens - num_sampled - 1)
        if num_drafts < 1 or sequence.given_id is not None or len(sequence.unread) > MAX_UNREAD:
            return ()
        if self._num_given == 0:
            self._drafter.extend(sequence.request.prompt_ids)
        self._drafter.extend(sequence.sampled[self._num_given :])
        self._num_given = num_sampled
        return self._drafter.propose(num_drafts)

    def tell(self, *, num_drafted: int, num_accepted: int) -> None:
        self._pace.tell(num_drafted=num_drafted, num_accepted=num_accepted, num_sampled=len(self._sequence.sampled))
