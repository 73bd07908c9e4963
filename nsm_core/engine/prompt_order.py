"""Which prompts a step reads, and how much of each. Plain Python: no torch, no clock.

The rules, first to last:

- Every AGEING_STEPS-th step begins with the prompt that was admitted first. So a long prompt is read at a quarter of
  the full speed at least once it is the oldest, however many short ones come.
- Owners share: the one for whom least was read comes next, PORTION tokens at a time if others wait too. An owner who
  comes gets as much as the one who had least, so nobody saves up time.
- Of an owner's prompts, the one with the fewest unread tokens comes first; of equal ones the oldest. The first tokens
  of a crowd of equal prompts then come one after the other, and not all with the last one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

AGEING_STEPS = 4
PORTION = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a prompt: tokens start .. start + length of the request in `slot`."""

    slot: int
    start: int
    length: int


@dataclasses.dataclass(frozen=True, slots=True)
class UnreadPrompt:
    """The unread tokens from `start` on: `num_unread` in all, and at most `most` of them in one step."""

    slot: int
    owner: str
    start: int
    num_unread: int
    most: int


class OwnerShares:
    """The tokens of prompts that were read for each owner with unread ones, from one common start."""

    def __init__(self) -> None:
        self._num_read: dict[str, int] = {}

    def of(self, owners: Iterable[str]) -> dict[str, int]:
        """Of these owners; one that is new stands where the one with least does."""
        least = min(self._num_read.values(), default=0)
        return {owner: self._num_read.get(owner, least) for owner in owners}

    def record(self, read: Mapping[str, int], *, still_reading: Iterable[str]) -> None:
        """After a step that read `read` tokens for its owners. Those without unread prompts are forgotten."""
        shares = self.of({*read, *still_reading})
        self._num_read = {owner: shares[owner] + read.get(owner, 0) for owner in still_reading}


def share_budget(
    prompts: Sequence[UnreadPrompt], budget: int, *, unit: int, num_read: Mapping[str, int], is_oldest_first: bool
) -> tuple[Chunk, ...]:
    """The chunks of a step, in the order of `prompts`, which is that of admission.

    At most `budget` tokens, cut at multiples of `unit` (then one unit at least); `num_read`: of each owner, so far.
    """
    if unit > 1:
        budget = max(budget, unit)
    lengths = dict.fromkeys((prompt.slot for prompt in prompts), 0)
    shares = dict(num_read)
    if prompts and is_oldest_first:
        oldest = prompts[0]
        lengths[oldest.slot] = whole_units(oldest.most, budget, unit)
        shares[oldest.owner] += lengths[oldest.slot]
        budget -= lengths[oldest.slot]
    queues = _by_owner(prompts)
    while budget > 0 and queues:
        owner = min(queues, key=shares.__getitem__)
        prompt = queues[owner][-1]
        portion = budget if len(queues) == 1 else min(budget, max(PORTION, unit))
        length = whole_units(prompt.most - lengths[prompt.slot], portion, unit)
        lengths[prompt.slot] += length
        shares[owner] += length
        budget -= length
        if length == 0 or lengths[prompt.slot] == prompt.most:
            queues[owner].pop()
            if not queues[owner]:
                del queues[owner]
    return tuple(Chunk(prompt.slot, prompt.start, lengths[prompt.slot]) for prompt in prompts if lengths[prompt.slot])


def _by_owner(prompts: Sequence[UnreadPrompt]) -> dict[str, list[UnreadPrompt]]:
    """Each owner's prompts, the one to read first at the end."""
    queues: dict[str, list[UnreadPrompt]] = {}
    for prompt in reversed(prompts):
        queues.setdefault(prompt.owner, []).append(prompt)
    for queue in queues.values():
        queue.sort(key=lambda prompt: -prompt.num_unread)  # stable: of equal ones the oldest is last
    return dict(reversed(queues.items()))


def whole_units(length: int, most: int, unit: int) -> int:
    """All of `length`, or as many whole units as fit into `most`."""
    return length if length <= most else max(0, most) // unit * unit
