"""Speculative decoding: drafts from the text itself (prompt lookup), and the rollback of refused ones. Plain Python.

A step reads a request's drafts in one call and samples after each. Drafts that equal the sampled tokens are accepted,
so one step gives several tokens of a request. The tokens are those of plain decoding: see `Executor.savepoint`.
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

logger = logging.getLogger("nsm.engine")

# Drafts by slot; slots without drafts are absent.
Drafts = Mapping[int, Sequence[int]]
NO_DRAFTS: Drafts = MappingProxyType({})

# With more rows a step is bound by arithmetic, and one more token costs as much as in a step of its own.
MAX_ROWS = 4
# Unread text is read with the next drafts, and again when these are refused.
MAX_UNREAD = 8

# Tokens that must have occurred before, in this order. Shorter grams fail too often in texts without repetition; longer
# ones find the same drafts, later.
GRAM_LENGTH = 4
# The last tokens of the text that are searched, up to twice as many. It bounds memory: a megabyte a text.
WINDOW_TOKENS = 2048

MIN_DRAFTS, MAX_DRAFTS = 2, 8  # at a time
DRAFT_EVERY = 4  # tokens that may be decoded in one call before drafts are looked for again
NO_LIMIT = 1 << 30
INITIAL_ACCEPTANCE = 0.5  # assumed acceptance rate before the first draft
NEWEST_WEIGHT = 0.25  # of the newest drafts in the running acceptance rate
MIN_ACCEPTANCE = 0.3  # drafts below it cost more than they save; on a CPU one more token costs an eighth of a step
RETRY_ACCEPTANCE = 0.4  # after a pause: one failure starts the next pause
GOOD_ACCEPTANCE = 0.6
MIN_PAUSE_TOKENS, MAX_PAUSE_TOKENS = 32, 512


def can_draft(request: GenerationRequest) -> bool:
    """Whether drafts are likely to be accepted: greedy requests whose logits do not depend on earlier tokens' counts.

    At higher temperatures few drafts match. Routing capture needs a step for each token.
    """
    return request.sampling.is_greedy and not request.sampling.has_penalties and not request.include_routing


class Speculation:
    """Proposes drafts for the requests of one engine. A SlotListener."""

    def __init__(self, config: EngineConfig, *, is_possible: bool) -> None:
        """`is_possible`: whether the executor has savepoints."""
        is_wanted = config.speculation == "lookup"
        self._is_on = is_wanted and is_possible
        if is_wanted and not is_possible:
            logger.debug("no tokens are drafted: with this executor they would not be those of plain decoding")
        self._token_budget = config.token_budget
        self._rows: dict[int, _DraftedRequest] = {}

    def open(self, slot: int, sequence: RunningSequence) -> None:
        if self._is_on and can_draft(sequence.request):
            self._rows[slot] = _DraftedRequest(sequence)

    def close(self, slot: int) -> None:
        self._rows.pop(slot, None)

    def propose(self, plan: Plan, running: Mapping[int, RunningSequence]) -> Drafts:
        """Drafts for the step of this plan. None beside prompts, where a draft costs as much as a prompt's token."""
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

    def most_rounds(self, plan: Plan) -> int:
        """Tokens that these slots may decode until drafts are looked for again."""
        rows = [self._rows[slot] for slot in plan.decode if slot in self._rows]
        if not rows or len(plan.decode) > MAX_ROWS:
            return NO_LIMIT
        return min(row.num_before_drafts() for row in rows)

    def record(self, slot: int, *, num_drafted: int, num_accepted: int) -> None:
        """The result of a slot's drafts, after its accepted tokens were appended."""
        row = self._rows.get(slot)
        if row is not None:
            row.record(num_drafted=num_drafted, num_accepted=num_accepted)


class _DraftedRequest:
    """The drafter of one request. It does not search the session's earlier text, which the engine does not have."""

    def __init__(self, sequence: RunningSequence) -> None:
        self._sequence = sequence
        self._pace = DraftPace()
        self._drafter = NgramDrafter()
        self._num_indexed = 0  # sampled tokens that the drafter has

    def propose(self, room: int) -> Sequence[int]:
        """At most `room` tokens, and one fewer than may still be sampled: one token is sampled after the drafts."""
        sequence = self._sequence
        num_sampled = len(sequence.sampled)
        num_drafts = min(self._pace.num_drafts(num_sampled), room, sequence.params.max_tokens - num_sampled - 1)
        if num_drafts < 1 or sequence.forced_id is not None or len(sequence.unread) > MAX_UNREAD:
            return ()
        if self._num_indexed == 0:
            self._drafter.extend(sequence.request.prompt_ids)
        self._drafter.extend(sequence.sampled[self._num_indexed :])
        self._num_indexed = num_sampled
        drafts = self._drafter.propose(num_drafts)
        return drafts if sequence.matcher is None else drafts[: sequence.matcher.num_valid(drafts)]

    def num_before_drafts(self) -> int:
        """Tokens until drafts are looked for."""
        return max(DRAFT_EVERY, self._pace.num_paused(len(self._sequence.sampled)))

    def record(self, *, num_drafted: int, num_accepted: int) -> None:
        self._pace.record(num_drafted=num_drafted, num_accepted=num_accepted, num_sampled=len(self._sequence.sampled))


class NgramDrafter:
    """Proposes the tokens that followed the last gram at its previous occurrence. A pure function of its ids."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._next_index: dict[tuple[int, ...], int] = {}  # by gram: index of the token after its last occurrence

    def extend(self, ids: Sequence[int]) -> None:
        """Appends ids to the text; only the last WINDOW_TOKENS of them are used."""
        for token_id in ids[-WINDOW_TOKENS:]:
            self._index_last_gram()
            self._ids.append(token_id)
        if len(self._ids) > 2 * WINDOW_TOKENS:
            self._drop_old()

    def propose(self, num_tokens: int) -> list[int]:
        """`num_tokens` drafts, or none. A gram that overlaps its continuation is a period, which is repeated."""
        start = self._next_index.get(tuple(self._ids[-GRAM_LENGTH:]))
        if start is None:
            return []
        drafts = self._ids[start : start + num_tokens]
        period = len(drafts)  # shorter than num_tokens: the text ended, and so it repeats
        return [drafts[index % period] for index in range(num_tokens)]

    def _index_last_gram(self) -> None:
        """The next token will follow the gram at the end of the text."""
        if len(self._ids) >= GRAM_LENGTH:
            self._next_index[tuple(self._ids[-GRAM_LENGTH:])] = len(self._ids)

    def _drop_old(self) -> None:
        newest, self._ids, self._next_index = self._ids[-WINDOW_TOKENS:], [], {}
        self.extend(newest)


class DraftPace:
    """The number of drafts for one text: more while they are accepted, none for a pause where they are not.

    Pauses double, so a text without repetition pays for few drafts.
    """

    def __init__(self) -> None:
        self._num_drafts = MIN_DRAFTS
        self._acceptance = INITIAL_ACCEPTANCE
        self._pause = MIN_PAUSE_TOKENS
        self._paused_until = 0

    def num_drafts(self, num_sampled: int) -> int:
        """For a text of `num_sampled` tokens; 0 in a pause."""
        return 0 if num_sampled < self._paused_until else self._num_drafts

    def num_paused(self, num_sampled: int) -> int:
        """Tokens until the pause ends; 0 outside of one."""
        return max(0, self._paused_until - num_sampled)

    def record(self, *, num_drafted: int, num_accepted: int, num_sampled: int) -> None:
        """The result of the last drafts; the text has `num_sampled` tokens now."""
        self._acceptance += NEWEST_WEIGHT * (num_accepted / num_drafted - self._acceptance)
        grown = 2 * self._num_drafts if num_accepted == num_drafted else num_accepted
        self._num_drafts = min(MAX_DRAFTS, max(MIN_DRAFTS, grown))
        if self._acceptance < MIN_ACCEPTANCE:
            self._paused_until = num_sampled + self._pause
            self._pause = min(MAX_PAUSE_TOKENS, 2 * self._pause)
            self._acceptance = RETRY_ACCEPTANCE
        elif self._acceptance > GOOD_ACCEPTANCE:
            self._pause = MIN_PAUSE_TOKENS


class DraftRollback:
    """Restores the states of slots whose drafts were refused. A restored state has unread text: it is pending.

    A savepoint lasts until the next step begins.
    """

    def __init__(self) -> None:
        self._savepoints: dict[int, tuple[Savepoint, int]] = {}  # by slot, with the sampled tokens it had read
        self._pending: set[int] = set()

    @property
    def has_pending(self) -> bool:
        """Whether a state has more to read than the last sampled token."""
        return bool(self._pending)

    def begin_step(self) -> None:
        self._savepoints.clear()

    def begin(self, slot: int, sequence: RunningSequence, savepoint: Savepoint) -> None:
        """The slot is about to read all of its text, and drafts."""
        self._savepoints[slot] = savepoint, sequence.num_fed
        self.catch_up(slot, sequence)

    def catch_up(self, slot: int, sequence: RunningSequence) -> None:
        """The slot reads all of its text."""
        sequence.num_fed_before_drafts = None
        self._pending.discard(slot)

    def rollback(self, slot: int, sequence: RunningSequence) -> None:
        """Restores the state from before the drafts of the last step, if the slot had any."""
        if slot in self._savepoints:
            savepoint, sequence.num_fed_before_drafts = self._savepoints.pop(slot)
            savepoint.restore()
            self._pending.add(slot)

    def remove(self, slot: int) -> None:
        """The slot's request ended."""
        self._savepoints.pop(slot, None)
        self._pending.discard(slot)
