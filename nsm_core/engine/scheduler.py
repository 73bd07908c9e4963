"""Decides what one step does. Plain Python: no torch, no clock, no text.

The policy, in one place:

- Every request that has read its prompt decodes one token in every step, and drafts of more (speculation.py); decoding
  is never put off (but for requests whose routing is told, beside others: watched.py).
- What is left of the token budget reads prompts. Prompts take turns: one that was served goes to the back of the line.
  A step serves as many as can get a chunk of MIN_CHUNK_LEN tokens (short prompts take less and leave the rest), from
  the front, in equal shares; what nobody else needs goes to the front again. So a huge prompt delays a short one that
  comes later by a few steps, and chunks stay large enough for the model to be fast.
- Where the model's bits depend on where a prompt is cut, it is cut at multiples of a unit, whatever else runs. Then a
  step reads one unit at least, if there is any prompt, even where decoding has taken the whole budget.
- Requests wait in order of arrival for a slot; the lowest free slot is given first, so that running rows stay dense.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence

from nsm_core.errors import Overloaded

# A batch pays for padding; a further call of the model pays for its many small operations. Up to this much padding, or
# this share of the batch's real tokens, is cheaper than a call.
MAX_PADDING_TOKENS = 32
MAX_PADDING_SHARE = 0.25


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


MIN_CHUNK_LEN = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a prompt: tokens start .. start + length of the request in `slot`."""

    slot: int
    start: int
    length: int


@dataclasses.dataclass(frozen=True, slots=True)
class Admission:
    """A request that leaves the queue for a slot."""

    slot: int
    request_id: str


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """One step: slots to fill first, slots that decode one token, pieces of prompts to read."""

    admitted: tuple[Admission, ...] = ()
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
    """What the scheduler knows of one request."""

    request_id: str
    prompt_len: int
    borders: tuple[int, ...]
    num_read: int = 0

    @property
    def is_decoding(self) -> bool:
        return self.num_read == self.prompt_len

    @property
    def next_border(self) -> int:
        """Where the chunk that comes next must end at the latest."""
        return next((border for border in self.borders if border > self.num_read), self.prompt_len)


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

    def add(self, request_id: str, *, prompt_len: int, borders: tuple[int, ...] = ()) -> None:
        """Put a request in the queue. Raises Overloaded when more would wait than the queue may hold.

        No chunk goes across one of the `borders` (rising numbers of prompt tokens): somebody wants the state there.
        """
        if len(self._waiting) >= self._queue_limit + len(self._free_slots):
            raise Overloaded(f"{len(self._waiting)} requests are waiting, the limit is {self._queue_limit}")
        self._waiting[request_id] = _Progress(request_id, prompt_len, borders)

    def plan(self) -> Plan:
        """What to do next; changes nothing."""
        admitted = tuple(
            Admission(slot, request_id)
            for slot, request_id in zip(sorted(self._free_slots), self._waiting, strict=False)
        )
        decode = tuple(self._decoding)
        unread = [self._unread(slot, self._running[slot]) for slot in self._reading]
        unread += [self._unread(admission.slot, self._waiting[admission.request_id]) for admission in admitted]
        return Plan(admitted, decode, _share(unread, self._token_budget - len(decode), self._prompt_unit))

    def apply(self, plan: Plan) -> None:
        """The plan was run: requests got their slots and have read their chunks."""
        for admission in plan.admitted:
            self._free_slots.remove(admission.slot)
            self._running[admission.slot] = self._waiting.pop(admission.request_id)
            self._reading.append(admission.slot)
        for chunk in plan.prefill:
            progress = self._running[chunk.slot]
            progress.num_read += chunk.length
            self._reading.remove(chunk.slot)
            if progress.is_decoding:
                bisect.insort(self._decoding, chunk.slot)
            else:
                self._reading.append(chunk.slot)

    def remove(self, request_id: str) -> None:
        """The request is over, or was cancelled: its place in the queue or its slot is free."""
        if self._waiting.pop(request_id, None) is not None:
            return
        slot = next(slot for slot, progress in self._running.items() if progress.request_id == request_id)
        del self._running[slot]
        self._free_slots.add(slot)
        (self._reading if slot in self._reading else self._decoding).remove(slot)

    @staticmethod
    def _unread(slot: int, progress: _Progress) -> Chunk:
        return Chunk(slot, progress.num_read, progress.next_border - progress.num_read)


def _share(unread: Sequence[Chunk], budget: int, unit: int) -> tuple[Chunk, ...]:
    """Cuts what is unread (next in turn first) down to `budget` tokens, at multiples of `unit`."""
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
