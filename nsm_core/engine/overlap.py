"""Looking ahead: a step is launched before the ids of the one before it have come, so that the device computes while
Python works. What is given out stays that of plain steps, to the bit.

The next step takes its ids from the last one on the device. A request that turns out to be over (end of text, a stop
id, numbers that are not finite) is left out of it there, so its state is the one of its end; `max_tokens` is known
beforehand. One whose text is held back for a stop string from now on, and that may have to go back to this state, is
left out as well: it goes on a step later, when the state was copied.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence

import numpy as np

from nsm_core.engine.scheduler import Chunk, Plan
from nsm_core.engine.sequence import RunningSequence
from nsm_core.execution.base import LookAhead, Upcoming
from nsm_core.sampling.device import LaunchedTokens
from nsm_core.sampling.sampler import is_plain
from nsm_core.state.spec import State

# Of the vocabulary. A request that pauses at more of it would have a step in vain for many of its tokens.
MAX_PAUSING_SHARE = 0.125


def may_look_ahead(sequence: RunningSequence) -> bool:
    """Whether the sequence may be in a step that is launched before the last one is over.

    Not where the host has a part in each token: log-probabilities, bias, penalties, routing that is told, ids that are
    given. Nor where a stop string begins with what many tokens have, and shortly before a state is copied because a
    text has been held back for long.
    """
    request = sequence.request
    is_scored = request.prompt_logprobs is not None and not sequence.sampled
    return (
        is_plain(sequence.params)
        and not request.include_routing
        and sequence.given_id is None
        and not is_scored
        and len(sequence.pausing_ids) <= MAX_PAUSING_SHARE * sequence.vocab_size
        and not sequence.rewind_points.is_copy_near(num_fed=len(sequence.sampled))
    )


@dataclasses.dataclass(slots=True)
class LaunchedStep:
    """A step in flight.

    `sequences`: all that take part, by slot; a slot may have been given to another one since. `slots`: those for which
    a token is sampled, in the order of `tokens`. `ending`: those of them that reach `max_tokens` with it. `kept`: by
    slot, copies of states that are asked for as they are after this step. `paused`: slots that turned out to be left
    out of it, and go on.
    """

    plan: Plan
    sequences: dict[int, RunningSequence]
    slots: list[int]
    tokens: LaunchedTokens
    ending: set[int]
    kept: dict[int, State]
    paused: set[int] = dataclasses.field(default_factory=set)
    launched_at: float = dataclasses.field(default_factory=time.monotonic)

    def wait(self) -> list[int]:
        """The ids of `slots`, NOT_FINITE for one whose numbers are not finite."""
        return self.tokens.wait()

    def has(self, slot: int, sequence: RunningSequence) -> bool:
        """Whether it is computed for this sequence, as far as is known."""
        return self.sequences.get(slot) is sequence and slot not in self.paused

    def has_any(self, running: Mapping[int, RunningSequence]) -> bool:
        """Whether one of its sequences is not over."""
        return any(running.get(slot) is sequence for slot, sequence in self.sequences.items())

    def behind(self, plan: Plan) -> Plan:
        """The plan for the step after this one, without those that will be over."""
        if not self.ending:
            return plan
        return dataclasses.replace(plan, decode=tuple(slot for slot in plan.decode if slot not in self.ending))

    def pause(self, slot: int, sequence: RunningSequence) -> None:
        """The sequence's last token, known by now, was one that it pauses at."""
        if self.has(slot, sequence):
            sequence.num_in_flight -= 1
            self.paused.add(slot)
            self.ending.discard(slot)

    def plan_of(self, running: Mapping[int, RunningSequence]) -> Plan:
        """The plan, without sequences that have paused or are over: what these have read too much is nobody's."""
        over = {slot for slot, sequence in self.sequences.items() if running.get(slot) is not sequence} | self.paused
        if not over:
            return self.plan
        return Plan(
            decode=tuple(slot for slot in self.plan.decode if slot not in over),
            prefill=tuple(chunk for chunk in self.plan.prefill if chunk.slot not in over),
        )


class Hindrances:
    """The running requests of one engine in whose company no step is launched ahead."""

    def __init__(self, look_ahead: LookAhead | None) -> None:
        """None: the executor cannot, or something else speaks against it."""
        self._look_ahead = look_ahead
        self._slots: set[int] = set()

    def add(self, slot: int, sequence: RunningSequence) -> None:
        """A request that has got its slot."""
        if not may_look_ahead(sequence):
            self._slots.add(slot)

    def look_again(self, running: Mapping[int, RunningSequence]) -> None:
        """They have had a step more: what hindered may be over."""
        self._slots = {slot for slot in self._slots if not may_look_ahead(running[slot])}

    def remove(self, slot: int) -> None:
        """The request of this slot, in the way or not, is over."""
        self._slots.discard(slot)

    def allow(self, plan: Plan, sequences: Mapping[str, RunningSequence]) -> bool:
        """Whether this plan may be launched. `sequences`: by request id."""
        if self._look_ahead is None or self._slots:
            return False
        if len(plan.decode) + len(plan.prefill) < self._look_ahead.min_rows:
            return False
        return all(may_look_ahead(sequences[admission.request_id]) for admission in plan.admitted)


def upcoming(
    slots: Sequence[int],
    singles: Sequence[Chunk],
    sequences: Mapping[int, RunningSequence],
    before: LaunchedStep | None,
) -> Upcoming:
    """What `slots` read: `singles` a token of their prompts, the others what was sampled last, in `before` mostly."""
    sampled_in = [] if before is None else before.slots
    paused = set() if before is None else before.paused
    if not singles and not paused and slots == sampled_in:  # nobody came, nobody left
        sources, ids = np.arange(len(slots)), np.zeros(len(slots), np.int64)
    else:
        given = {chunk.slot: sequences[chunk.slot].read_ids[chunk.start] for chunk in singles}
        places = {slot: place for place, slot in enumerate(sampled_in) if slot not in given and slot not in paused}
        sources = np.array([places.get(slot, -1) for slot in slots])
        ids = np.zeros(len(slots), np.int64)
        for index in np.flatnonzero(sources < 0).tolist():
            slot = slots[index]
            ids[index] = given[slot] if slot in given else sequences[slot].sampled[-1]
    return Upcoming(ids, sources, before.tokens.ids if before is not None and sampled_in else None)
