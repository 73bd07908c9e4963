"""Decides the content of a step. Plain Python: no torch, no clock, no text.

The policy:

- Every request that has read its prompt decodes one token a step, plus drafts (speculation.py). Decoding is deferred
  only for requests with routing capture beside others (routing_watch.py).
- The rest of the token budget reads prompts, in turn: a prompt that got a chunk goes to the back of the line. A step
  serves as many prompts from the front as can get a chunk of MIN_CHUNK_LEN tokens, in equal shares; shorter prompts
  take less, and the remainder goes to the front again. So a huge prompt delays a later short one by a few steps, and
  chunks stay large enough for the model to be fast.
- Where the model's bits depend on the cuts of a prompt, prompts are cut at multiples of a unit. Then a step with
  prompts reads at least one unit, even if decoding has used the whole budget.
- Requests wait for a slot in order of arrival. The lowest free slot is assigned first, so running rows stay dense.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence

from nsm_core.errors import Overloaded

MIN_CHUNK_LEN = 64
# A batch pays for padding; another call of the model pays for its many small operations. Padding up to so many tokens,
# or up to this share of the batch's real tokens, is cheaper than a call.
MAX_PADDING_TOKENS = 32
MAX_PADDING_SHARE = 0.25


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a prompt: tokens start .. start + length of the request in `slot`."""

    slot: int
    start: int
    length: int


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
    prompt_len: int
    boundaries: tuple[int, ...]
    is_held: bool = False
    num_read: int = 0

    @property
    def is_decoding(self) -> bool:
        return self.num_read == self.prompt_len

    @property
    def next_boundary(self) -> int:
        """The latest end of the next chunk."""
        return next((boundary for boundary in self.boundaries if boundary > self.num_read), self.prompt_len)


class Scheduler:
    """Which requests wait, which run in which slot, and how far each has read its prompt."""

    def __init__(self, *, max_slots: int, token_budget: int, queue_limit: int, prompt_unit: int = 1) -> None:
        self._token_budget, self._prompt_unit = token_budget, prompt_unit
        self._queue_limit = queue_limit
        self._free_slots = set(range(max_slots))
        self._waiting: dict[str, _Progress] = {}  # in order of arrival
        self._running: dict[int, _Progress] = {}
        self._reading: list[int] = []  # slots with unread prompt, next in turn first
        self._decoding: list[int] = []  # the other running slots, in order

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def add(self, request_id: str, *, prompt_len: int, boundaries: tuple[int, ...] = (), is_held: bool = False) -> None:
        """Puts a request in the queue. Raises Overloaded when the queue is full.

        No chunk crosses one of the `boundaries` (rising numbers of prompt tokens), so the state there can be copied.
        `is_held`: it gets no slot before `release`.
        """
        if len(self._waiting) >= self._queue_limit + len(self._free_slots):
            raise Overloaded(f"{len(self._waiting)} requests are waiting, the limit is {self._queue_limit}")
        self._waiting[request_id] = _Progress(request_id, prompt_len, boundaries, is_held)

    def release(self, request_id: str, *, num_read: int) -> None:
        """A held request may leave the queue; its state has read `num_read` tokens of the prompt."""
        progress = self._waiting[request_id]
        progress.is_held, progress.num_read = False, num_read

    def plan(self) -> Plan:
        """The next step; changes nothing."""
        due = (request_id for request_id, progress in self._waiting.items() if not progress.is_held)
        admitted = tuple(
            SlotAssignment(slot, request_id) for slot, request_id in zip(sorted(self._free_slots), due, strict=False)
        )
        decode = tuple(self._decoding)
        unread = [self._unread(slot, self._running[slot]) for slot in self._reading]
        unread += [self._unread(assignment.slot, self._waiting[assignment.request_id]) for assignment in admitted]
        return Plan(admitted, decode, _share(unread, self._token_budget - len(decode), self._prompt_unit))

    def apply(self, plan: Plan) -> None:
        """Records that the plan was run: requests got their slots and read their chunks."""
        for assignment in plan.admitted:
            self._free_slots.remove(assignment.slot)
            self._running[assignment.slot] = self._waiting.pop(assignment.request_id)
            self._reading.append(assignment.slot)
        for chunk in plan.prefill:
            progress = self._running[chunk.slot]
            progress.num_read += chunk.length
            self._reading.remove(chunk.slot)
            if progress.is_decoding:
                bisect.insort(self._decoding, chunk.slot)
            else:
                self._reading.append(chunk.slot)

    def remove(self, request_id: str) -> None:
        """The request ended: its slot, or its position in the queue, becomes free."""
        if self._waiting.pop(request_id, None) is not None:
            return
        slot = next(slot for slot, progress in self._running.items() if progress.request_id == request_id)
        del self._running[slot]
        self._free_slots.add(slot)
        (self._reading if slot in self._reading else self._decoding).remove(slot)

    @staticmethod
    def _unread(slot: int, progress: _Progress) -> Chunk:
        return Chunk(slot, progress.num_read, progress.next_boundary - progress.num_read)


def _share(unread: Sequence[Chunk], budget: int, unit: int) -> tuple[Chunk, ...]:
    """Cuts the unread pieces (next in turn first) down to `budget` tokens, at multiples of `unit`."""
    if unit > 1:
        budget = max(budget, unit)
    if not unread or budget <= 0:
        return ()
    share = max(MIN_CHUNK_LEN, budget // len(unread))
    lengths: list[int] = []
    for chunk in unread:
        lengths.append(_whole_units(chunk.length, min(share, budget), unit))
        budget -= lengths[-1]
    for index, chunk in enumerate(unread):
        extra = _whole_units(chunk.length - lengths[index], budget, unit)
        lengths[index] += extra
        budget -= extra
    pairs = zip(unread, lengths, strict=True)
    return tuple(Chunk(chunk.slot, chunk.start, length) for chunk, length in pairs if length)


def _whole_units(length: int, most: int, unit: int) -> int:
    """All of `length`, or as many whole units as fit into `most`."""
    return length if length <= most else max(0, most) // unit * unit


def group_by_length(chunks: Sequence[Chunk]) -> list[tuple[Chunk, ...]]:
    """Splits chunks into right-padded batches, longest chunk first, none with more padding than the limits allow."""
    groups: list[list[Chunk]] = []
    for chunk in sorted(chunks, key=lambda chunk: (-chunk.length, chunk.slot)):
        if groups and _is_padding_bounded([*groups[-1], chunk]):
            groups[-1].append(chunk)
        else:
            groups.append([chunk])
    return [tuple(sorted(group, key=lambda chunk: chunk.slot)) for group in groups]


def num_padding_tokens(group: Sequence[Chunk]) -> int:
    """Tokens of padding when the chunks are one batch."""
    return max(chunk.length for chunk in group) * len(group) - sum(chunk.length for chunk in group)


def _is_padding_bounded(group: Sequence[Chunk]) -> bool:
    num_real = sum(chunk.length for chunk in group)
    return num_padding_tokens(group) <= max(MAX_PADDING_TOKENS, MAX_PADDING_SHARE * num_real)
