"""Speculative decoding: which requests have tokens drafted for them, and which tokens. Plain Python.

A step reads a request's drafts in one call and samples after each; those that are what was sampled anyway are taken,
so a step gives several tokens of a request. The tokens are those of plain decoding: see `Executor.savepoint`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from nsm_core.config import EngineConfig
from nsm_core.engine.request import GenerationRequest
from nsm_core.engine.scheduler import Plan
from nsm_core.engine.sequence import RunningSequence
from nsm_core.execution.base import Savepoint

# Tokens that must have occurred before, in this order. What follows fewer is a guess that fails too often in texts that
# do not repeat themselves; in those that do, longer ones find nothing else, later.
GRAM_LENGTH = 4
# Of the text, the last so many tokens are looked through, up to twice as many: it bounds memory (a megabyte a text).
WINDOW_TOKENS = 2048

MIN_DRAFTS, MAX_DRAFTS = 2, 8  # at a time
FIRST_SHARE = 0.5  # of drafts that are taken to come true, before any has
NEW_SHARE = 0.25  # what the newest drafts count in it
WORTH_SHARE = 0.3  # below it drafts cost more than they give; on a CPU a token more in a step costs an eighth of one
AGAIN_SHARE = 0.4  # after a pause: one failure ends the next try
GOOD_SHARE = 0.6
MIN_PAUSE_TOKENS, MAX_PAUSE_TOKENS = 32, 512


class NgramDrafter:
    """What followed the last few tokens when they last occurred. Its drafts depend on the ids it was given alone."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._followed: dict[tuple[int, ...], int] = {}  # by gram: index of the token after its last occurrence

    def extend(self, ids: Sequence[int]) -> None:
        """The text goes on with these; of very many only the last count."""
        for token_id in ids[-WINDOW_TOKENS:]:
            self._note_end()
            self._ids.append(token_id)
        if len(self._ids) > 2 * WINDOW_TOKENS:
            self._forget_old()

    def propose(self, num_tokens: int) -> list[int]:
        """So many tokens that may come next, or none. A gram that overlaps what followed it goes on for ever."""
        start = self._followed.get(tuple(self._ids[-GRAM_LENGTH:]))
        if start is None:
            return []
        drafts = self._ids[start : start + num_tokens]
        period = len(drafts)  # shorter than asked for: the text ended, and so it repeats
        return [drafts[index % period] for index in range(num_tokens)]

    def _note_end(self) -> None:
        """What comes now follows the gram at the end of the text."""
        if len(self._ids) >= GRAM_LENGTH:
            self._followed[tuple(self._ids[-GRAM_LENGTH:])] = len(self._ids)

    def _forget_old(self) -> None:
        kept, self._ids, self._followed = self._ids[-WINDOW_TOKENS:], [], {}
        self.extend(kept)


class DraftPace:
    """How many tokens to draft for one text: more while they come true, none for a while where they do not.

    Pauses double, so that a text which never repeats itself pays for few drafts.
    """

    def __init__(self) -> None:
        self._num_drafts = MIN_DRAFTS
        self._share = FIRST_SHARE
        self._pause = MIN_PAUSE_TOKENS
        self._paused_until = 0

    def num_drafts(self, num_sampled: int) -> int:
        """For a text of `num_sampled` tokens; 0 in a pause."""
        return 0 if num_sampled < self._paused_until else self._num_drafts

    def tell(self, *, num_drafted: int, num_accepted: int, num_sampled: int) -> None:
        """How the last drafts went; the text has `num_sampled` tokens now."""
        self._share += NEW_SHARE * (num_accepted / num_drafted - self._share)
        grown = 2 * self._num_drafts if num_accepted == num_drafted else num_accepted
        self._num_drafts = min(MAX_DRAFTS, max(MIN_DRAFTS, grown))
        if self._share < WORTH_SHARE:
            self._paused_until = num_sampled + self._pause
            self._pause = min(MAX_PAUSE_TOKENS, 2 * self._pause)
            self._share = AGAIN_SHARE
        elif self._share > GOOD_SHARE:
            self._pause = MIN_PAUSE_TOKENS


class DraftedStates:
    """Of one runner. What a state was before a step can be had until the next one begins."""

    def __init__(self) -> None:
        self._savepoints: dict[int, tuple[Savepoint, int]] = {}  # by slot, with the sampled tokens it had read
        self._behind: set[int] = set()

    @property
    def has_behind(self) -> bool:
        """Whether a state has more to read than the token sampled last."""
        return bool(self._behind)

    def begin_step(self) -> None:
        self._savepoints.clear()

    def begin(self, slot: int, sequence: RunningSequence, savepoint: Savepoint) -> None:
        """The slot is about to read all of its text, and drafts."""
        self._savepoints[slot] = savepoint, sequence.num_fed
        self.catch_up(slot, sequence)

    def catch_up(self, slot: int, sequence: RunningSequence) -> None:
        """The slot reads all of its text."""
        sequence.num_fed_before_drafts = None
        self._behind.discard(slot)

    def take_back(self, slot: int, sequence: RunningSequence) -> None:
        """The state is what it was before the drafts of the last step, if it had any, and so behind its text."""
        if slot in self._savepoints:
            savepoint, sequence.num_fed_before_drafts = self._savepoints.pop(slot)
            savepoint.restore()
            self._behind.add(slot)

    def remove(self, slot: int) -> None:
        """The slot's request is over."""
        self._savepoints.pop(slot, None)
        self._behind.discard(slot)


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
