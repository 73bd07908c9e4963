"""Decides the content of a step. Plain Python: no torch, no clock, no text.

The policy:

- Every request that has read its prompt decodes one token a step, plus drafts (speculation.py). Decoding is deferred
  only for requests with routing capture beside others (routing_watch.py).
- The rest of the token budget reads prompts: prompt_order.py tells which.
- Where the model's bits depend on the cuts of a prompt, prompts are cut at multiples of a unit. Then a step with
  prompts reads at least one unit, even if decoding has used the whole budget.
- Where each call of the model costs time (`prompt_tokens_beside`), a step in which others decode reads one batch of
  prompts of similar lengths, and more of them the more rows decode: such a step takes as long as a few others.
- Requests wait for a slot in order of arrival. The lowest free slot is assigned first, so running rows stay dense.
- Background requests (batches) stand behind the others. They get a slot after them, and half of the slots at most.
  While another request has no token yet, they skip the step. Beside requests that decode, no more of them decode than
  of those, in turns, and none reads. Every LEAST_SHARE_STEPS-th step they all take part, so that a batch gets on. Of
  their prompts a step reads a quarter of the budget at most: whoever comes meanwhile waits for its end.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from nsm_core.engine.prompt_order import AGEING_STEPS, OwnerShares, UnreadPrompt, share_budget
from nsm_core.engine.prompt_order import Chunk as Chunk  # a part of plans
from nsm_core.errors import Overloaded

# A batch pays for padding; another call of the model pays for its many small operations. Padding up to so many tokens,
# or up to this share of the batch's real tokens, is cheaper than a call.
MAX_PADDING_TOKENS = 32
MAX_PADDING_SHARE = 0.25
LEAST_SHARE_STEPS = 8
PROMPT_TOKENS_A_ROW = 8  # that decodes, beside it
BACKGROUND_PART = 4  # the share of a step's tokens that the background's prompts may have is one by this


@dataclasses.dataclass(frozen=True, slots=True)
class SlotAssignment:
    """A request that leaves the queue for a slot."""

    slot: int
    request_id: str


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """One step: slots to fill first, slots that decode one token, pieces of prompts to read."""

    admitted: tuple[SlotAssignment, ...] = ()
    decode: tuple[int, ...] = ()
    prefill: tuple[Chunk, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not self.decode and not self.prefill

    @property
    def num_tokens(self) -> int:
        """Tokens that the model reads in this step."""
        return len(self.decode) + sum(chunk.length for chunk in self.prefill)


@dataclasses.dataclass(slots=True)
class _Progress:
    """How far one request has read its prompt."""

    request_id: str
    owner: str
    prompt_len: int
    boundaries: tuple[int, ...]
    is_held: bool = False
    is_background: bool = False
    num_read: int = 0

    @property
    def is_decoding(self) -> bool:
        return self.num_read == self.prompt_len

    @property
    def next_boundary(self) -> int:
        """The latest end of the next chunk."""
        index = bisect.bisect_right(self.boundaries, self.num_read)
        return self.boundaries[index] if index < len(self.boundaries) else self.prompt_len


class Scheduler:
    """Which requests wait, which run in which slot, and how far each has read its prompt."""

    def __init__(
        self,
        *,
        max_slots: int,
        token_budget: int,
        queue_limit: int,
        prompt_unit: int = 1,
        prompt_tokens_beside: int | None = None,
        reads_ragged: bool = False,
    ) -> None:
        """`prompt_tokens_beside`: see EngineConfig; `reads_ragged`: see Executor."""
        self._token_budget, self._prompt_unit = token_budget, prompt_unit
        self._most_beside, self._reads_ragged = prompt_tokens_beside, reads_ragged
        self._queue_limit = queue_limit
        self._free_slots = set(range(max_slots))
        self._max_background = max(1, max_slots // 2)
        self._background: set[str] = set()  # waiting or running
        self._num_steps = 0
        self._waiting: dict[str, _Progress] = {}  # in order of arrival
        self._running: dict[int, _Progress] = {}
        self._slots: dict[str, int] = {}  # of the running ones
        self._reading: list[int] = []  # slots with unread prompt, in order of admission
        self._shares = OwnerShares()
        self._num_reading_steps = 0
        self._decoding: list[int] = []  # the other running slots, in order
        self._steady: Plan | None = None  # of steps in which they alone take part, until one of them goes

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def add(
        self,
        request_id: str,
        *,
        prompt_len: int,
        boundaries: tuple[int, ...] = (),
        is_held: bool = False,
        owner: str = "",
        is_background: bool = False,
    ) -> None:
        """Puts a request in the queue. Raises Overloaded when the queue is full.

        No chunk crosses one of the `boundaries` (rising numbers of prompt tokens), so the state there can be copied.
        `is_held`: it gets no slot before `release`. Owners share the reading of prompts.
        """
        if len(self._waiting) >= self._queue_limit + len(self._free_slots):
            raise Overloaded(f"{len(self._waiting)} requests are waiting, the limit is {self._queue_limit}")
        self._waiting[request_id] = _Progress(request_id, owner, prompt_len, boundaries, is_held, is_background)
        if is_background:
            self._background.add(request_id)

    def release(self, request_id: str, *, num_read: int) -> None:
        """A held request may leave the queue; its state has read `num_read` tokens of the prompt."""
        progress = self._waiting[request_id]
        progress.is_held, progress.num_read = False, num_read

    def plan(self) -> Plan:
        """The next step; changes nothing."""
        if not self._waiting and not self._reading and not self._background:
            if self._steady is None:
                self._steady = Plan(decode=tuple(self._decoding))
            return self._steady
        admitted = tuple(
            SlotAssignment(slot, request_id)
            for slot, request_id in zip(sorted(self._free_slots), self._due(), strict=False)
        )
        reading = {slot: self._running[slot] for slot in self._reading}
        reading |= {assignment.slot: self._waiting[assignment.request_id] for assignment in admitted}
        decode = tuple(self._decoding)
        if self._background:
            decode, reading = self._put_behind(decode, reading)
        budget = self._token_budget - len(decode)
        if not decode or self._most_beside is None:
            return Plan(admitted, decode, self._chunks(reading, budget))
        most = max(self._most_beside, PROMPT_TOKENS_A_ROW * len(decode))
        return Plan(admitted, decode, self._one_batch(self._chunks(reading, min(budget, most))))

    def _one_batch(self, chunks: tuple[Chunk, ...]) -> tuple[Chunk, ...]:
        """Those of one call of the model: with the prompt that was admitted first in its steps, else the most tokens.

        What is left of a budget mostly is the begin of one prompt more, which would take a call of its own.
        """
        batches = [] if self._reads_ragged else group_by_length(chunks, unit=self._prompt_unit)
        if len(batches) < 2:
            return chunks
        if self._is_oldest_first:
            return next(batch for batch in batches if chunks[0] in batch)
        return max(batches, key=lambda batch: sum(chunk.length for chunk in batch))

    def _chunks(self, reading: Mapping[int, _Progress], budget: int) -> tuple[Chunk, ...]:
        """What a step reads; of the background's prompts a quarter of its tokens at most."""
        if not self._background:
            return self._share(reading, budget)
        first = {slot: progress for slot, progress in reading.items() if not progress.is_background}
        chunks = self._share(first, budget) if first else ()
        left = budget - sum(chunk.length for chunk in chunks)
        behind = {slot: progress for slot, progress in reading.items() if progress.is_background}
        if not behind or left <= 0:
            return chunks
        return (*chunks, *self._share(behind, min(left, max(1, self._token_budget // BACKGROUND_PART))))

    def _share(self, reading: Mapping[int, _Progress], budget: int) -> tuple[Chunk, ...]:
        unread = [self._unread(slot, progress) for slot, progress in reading.items()]
        return share_budget(
            unread,
            budget,
            unit=self._prompt_unit,
            num_read=self._shares.of(prompt.owner for prompt in unread),
            is_oldest_first=self._is_oldest_first,
        )

    @property
    def _is_oldest_first(self) -> bool:
        return self._num_reading_steps % AGEING_STEPS == AGEING_STEPS - 1

    def _due(self) -> Iterator[str]:
        """The waiting requests that may have a slot, the first of them first."""
        due = [progress for progress in self._waiting.values() if not progress.is_held]
        if not self._background:
            yield from (progress.request_id for progress in due)
            return
        yield from (progress.request_id for progress in due if not progress.is_background)
        room = self._max_background - sum(progress.is_background for progress in self._running.values())
        behind = (progress.request_id for progress in due if progress.is_background)
        yield from itertools.islice(behind, max(0, room))

    def _put_behind(
        self, decode: tuple[int, ...], reading: dict[int, _Progress]
    ) -> tuple[tuple[int, ...], dict[int, _Progress]]:
        """The slots of the step, without background requests that stand back in it."""
        live_decode = [slot for slot in decode if not self._running[slot].is_background]
        live_reading = {slot: progress for slot, progress in reading.items() if not progress.is_background}
        if not (live_decode or live_reading) or self._num_steps % LEAST_SHARE_STEPS == LEAST_SHARE_STEPS - 1:
            return decode, reading
        if live_reading:
            return tuple(live_decode), live_reading
        behind = [slot for slot in decode if self._running[slot].is_background]
        first = self._num_steps * len(live_decode) % max(1, len(behind))
        chosen = (behind[first:] + behind[:first])[: len(live_decode)]
        return tuple(sorted((*live_decode, *chosen))), {}

    def apply(self, plan: Plan) -> None:
        """Records that the plan was run: requests got their slots and read their chunks."""
        self._num_steps += 1
        for assignment in plan.admitted:
            self._free_slots.remove(assignment.slot)
            self._running[assignment.slot] = self._waiting.pop(assignment.request_id)
            self._slots[assignment.request_id] = assignment.slot
            self._reading.append(assignment.slot)
        num_read = Counter[str]()
        for chunk in plan.prefill:
            progress = self._running[chunk.slot]
            progress.num_read += chunk.length
            num_read[progress.owner] += chunk.length
            if progress.is_decoding:
                self._reading.remove(chunk.slot)
                self._steady = None
                bisect.insort(self._decoding, chunk.slot)
        if plan.prefill:
            self._num_reading_steps += 1
            self._shares.record(num_read, still_reading={self._running[slot].owner for slot in self._reading})

    def remove(self, request_id: str) -> None:
        """The request ended: its slot, or its position in the queue, becomes free."""
        self._background.discard(request_id)
        if self._waiting.pop(request_id, None) is not None:
            return
        slot = self._slots.pop(request_id)
        del self._running[slot]
        self._free_slots.add(slot)
        (self._reading if slot in self._reading else self._decoding).remove(slot)
        self._steady = None

    @staticmethod
    def _unread(slot: int, progress: _Progress) -> UnreadPrompt:
        read = progress.num_read
        return UnreadPrompt(slot, progress.owner, read, progress.prompt_len - read, progress.next_boundary - read)


def group_by_length(chunks: Sequence[Chunk], *, unit: int = 1) -> list[tuple[Chunk, ...]]:
    """Splits chunks into right-padded batches, longest chunk first, none with more padding than the limits allow.

    `unit`: the executor pads each to a multiple of it anyway.
    """
    groups: list[list[Chunk]] = []
    for chunk in sorted(chunks, key=lambda chunk: (-chunk.length, chunk.slot)):
        if groups and _is_padding_bounded([-(-each.length // unit) * unit for each in (*groups[-1], chunk)]):
            groups[-1].append(chunk)
        else:
            groups.append([chunk])
    return [tuple(sorted(group, key=lambda chunk: chunk.slot)) for group in groups]


def num_padding_tokens(lengths: Sequence[int]) -> int:
    """Tokens of padding when chunks of these lengths are one batch."""
    return max(lengths) * len(lengths) - sum(lengths)


def _is_padding_bounded(lengths: Sequence[int]) -> bool:
    return num_padding_tokens(lengths) <= max(MAX_PADDING_TOKENS, MAX_PADDING_SHARE * sum(lengths))
