"""Tokens of overlapped steps as arrays: what most tokens do, they do for all rows at once, without a Python object."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from nsm_core.sampling.device import NUM_COLUMNS, POSITION_COLUMN

if TYPE_CHECKING:
    from nsm_core.engine.sequence import RunningSequence

Ints = npt.NDArray[np.int64]

NO_TAG = -1
NUMBER_BITS = 32  # of a listener's tag: the number of a request; above them is the index of the listener, from 1 on
NUM_HELD = 64  # tokens of a row that are held here before they join its list; more than rounds of a launch
MAX_KINDS = 64  # sets of ids that may end a request; requests with yet another one take the slow path


@dataclasses.dataclass(frozen=True, slots=True)
class TokenBatch:
    """Plain tokens of one step: tags [n] of their requests, and ids [n], int64; n is at least 1."""

    tags: Ints
    ids: Ints

    def by_listener(self) -> Iterator[tuple[int, Ints, Ints]]:
        """(index, numbers [n], ids [n]) for each index above the numbers; 0 has the tags without a listener."""
        indices = self.tags >> NUMBER_BITS
        numbers, ids = self.tags & (2**NUMBER_BITS - 1), self.ids
        if (indices == indices[0]).all():
            yield int(indices[0]), numbers, ids
            return
        order = indices.argsort(kind="stable")
        indices, numbers, ids = indices[order], numbers[order], ids[order]
        starts = [0, *(np.flatnonzero(indices[1:] != indices[:-1]) + 1).tolist(), len(indices)]
        for start, end in itertools.pairwise(starts):
            yield int(indices[start]), numbers[start:end], ids[start:end]


class TokenRows:
    """The tokens of each slot of an engine whose steps overlap. A SlotListener.

    A row with a tag has a request whose tokens mostly only add text that its reader makes: such tokens are taken by
    `take_plain`. The first token, the last one, and those that may end the request are not among them.
    """

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        def ints(fill: int = 0) -> Ints:
            return np.full(num_slots, fill, np.int64)

        self.tags, self.num_sampled, self.num_in_flight = ints(NO_TAG), ints(), ints()
        self._start, self._max_tokens, self._kind = ints(), ints(), ints()
        self._params = np.zeros((num_slots, NUM_COLUMNS), np.int64)
        self._held, self._num_held = np.zeros((num_slots, NUM_HELD), np.int64), ints()
        self._sequences: dict[int, RunningSequence] = {}
        self._lists: dict[int, list[int]] = {}
        self._kinds: dict[frozenset[int], int] = {}
        self._is_special = np.zeros((1, vocab_size), np.bool_)  # [kinds, vocabulary]

    def open(self, slot: int, sequence: RunningSequence) -> None:
        sampled = sequence.join(self, slot)
        self._sequences[slot], self._lists[slot] = sequence, sampled
        self.num_sampled[slot], self.num_in_flight[slot], self._num_held[slot] = len(sampled), 0, 0
        self._start[slot], self._max_tokens[slot] = sequence.prompt_tokens, sequence.params.max_tokens
        self._params[slot] = np.frombuffer(sequence.packed_params, np.int64)
        self.tags[slot] = self._tag_of(slot, sequence)

    def close(self, slot: int) -> None:
        if slot in self._sequences:
            self.drain(slot)
            del self._lists[slot]
            self._sequences.pop(slot).leave()
            self.tags[slot] = NO_TAG

    def _tag_of(self, slot: int, sequence: RunningSequence) -> int:
        if sequence.tag is None or not sequence.has_plain_tokens:
            return NO_TAG
        ids = sequence.output.special_ids
        if ids not in self._kinds:
            if len(self._kinds) == MAX_KINDS:
                return NO_TAG
            self._kinds[ids] = len(self._kinds)
            special = np.zeros((1, self._is_special.shape[1]), np.bool_)
            special[0, [token_id for token_id in ids if 0 <= token_id < special.shape[1]]] = True
            self._is_special = np.concatenate((self._is_special[: len(self._kinds) - 1], special))
        self._kind[slot] = self._kinds[ids]
        return sequence.tag

    def packed_params(self, slots: Ints) -> Ints:
        """[len(slots), 7]: as `pack_rows` of the sequences."""
        params = self._params[slots]
        params[:, POSITION_COLUMN] = self._start[slots] + self.num_sampled[slots] + self.num_in_flight[slots]
        return params

    def num_left(self, slots: Ints) -> Ints:
        """[len(slots)]: tokens that each may have sampled yet, by its `max_tokens`."""
        left: Ints = self._max_tokens[slots] - self.num_sampled[slots] - self.num_in_flight[slots]
        return left

    def most_rounds(self, slots: Ints, limit: int) -> int:
        """Rounds of a launch that `slots` can use, up to `limit`; 0: one of them needs the host after each token."""
        if not limit or (self.tags[slots] == NO_TAG).any():
            return 0
        return min(limit, int(self.num_left(slots).max()))

    def launched(self, slots: Ints, num_rounds: int = 1) -> Ints:
        """A step was launched that samples for `slots`, up to `num_rounds` tokens each. Returns those of them that
        reach their `max_tokens` with it.
        """
        left = self.num_left(slots)
        self.num_in_flight[slots] += np.minimum(left, num_rounds)
        ending: Ints = slots[left <= num_rounds]
        return ending

    def landed(self, slots: Ints, numbers: Ints) -> None:
        """So many tokens in flight of each have reached the host."""
        self.num_in_flight[slots] -= numbers

    @property
    def is_empty(self) -> bool:
        """Whether no row has a request: always, in an engine whose steps do not overlap."""
        return not self._sequences

    def take_plain(self, slots: Ints, tags: Ints, ids: Ints) -> npt.NDArray[np.bool_]:
        """Appends the plain ones of `ids` [rounds, len(slots)], which were sampled for `slots` when these had `tags`,
        up to the first of each slot that is not. Returns which were.

        A row that paused or ended meanwhile has none. Those that were in flight have landed: see `landed`.
        """
        rounds = np.arange(len(ids))[:, None]
        num_sampled = self.num_sampled[slots] + rounds  # if those before are plain
        is_inner = (num_sampled > 0) & (num_sampled < self._max_tokens[slots] - 1)
        is_plain: npt.NDArray[np.bool_] = (tags != NO_TAG) & (self.tags[slots] == tags) & is_inner & (ids >= 0)
        is_plain &= ~self._is_special[self._kind[slots], ids]
        if len(ids) > 1:
            is_plain = np.logical_and.accumulate(is_plain)
        self._hold(slots, ids, is_plain, rounds)
        return is_plain

    def _hold(self, slots: Ints, ids: Ints, is_plain: npt.NDArray[np.bool_], rounds: Ints) -> None:
        """rounds [n, 1]: 0, 1, ..."""
        numbers = is_plain.sum(axis=0)
        for slot in slots[self._num_held[slots] + numbers > NUM_HELD].tolist():
            self.drain(slot)
        at = self._num_held[slots] + rounds
        self._held[np.broadcast_to(slots, ids.shape)[is_plain], at[is_plain]] = ids[is_plain]
        self._num_held[slots] += numbers
        self.num_sampled[slots] += numbers

    def drain(self, slot: int) -> None:
        """The tokens held for the slot join its list."""
        num_held = int(self._num_held[slot])
        if num_held:
            self._lists[slot] += self._held[slot, :num_held].tolist()
            self._num_held[slot] = 0
