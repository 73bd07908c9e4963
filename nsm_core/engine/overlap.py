"""Overlap scheduling: launch step n + 1 before the token ids of step n have reached the host.

The device computes while Python works. Events stay bit-identical to plain steps.

Step n + 1 takes its ids from step n on the device. A request that ends with step n (end of text, a stop id, logits that
are not finite) is skipped there, so its state is that of its end; `max_tokens` is known on the host beforehand. A
request whose text is held back for a stop string from now on, and may rewind to this state, pauses: it skips the step
and continues one step later, after its state was copied.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from nsm_core.engine.scheduler import Chunk, Plan
from nsm_core.engine.sequence import RunningSequence
from nsm_core.engine.token_rows import TokenRows
from nsm_core.execution.base import NextInputs, Overlap
from nsm_core.sampling.device import PendingTokens
from nsm_core.state.spec import State

# Of the vocabulary. A request that pauses at more tokens would often take part in a step in vain.
MAX_PAUSING_SHARE = 0.125
FEW_PROMPT_TOKENS = 512  # a step that reads more is worth its launches


def may_overlap(sequence: RunningSequence) -> bool:
    """Whether the sequence may take part in a step that is launched before the last one has ended.

    Not if the host has a part in each token (log-probabilities, bias, penalties, routing capture, forced ids), if many
    tokens begin a stop string, or if a second state copy for a held text is near.
    """
    request = sequence.request
    is_scored = request.prompt_logprobs is not None and not sequence.sampled
    return (
        sequence.params.is_plain
        and not request.include_routing
        and sequence.forced_id is None
        and not is_scored
        and len(sequence.pausing_ids) <= MAX_PAUSING_SHARE * sequence.vocab_size
        and not sequence.rewind_points.is_copy_near(num_fed=len(sequence.sampled))
    )


@dataclasses.dataclass(slots=True)
class InFlightStep:
    """A step that was launched and not waited for.

    `sequences`: all that take part, by slot; a slot may have been assigned to another one since. `slots`: those for
    which a token is sampled, in the order of `tokens`. `ending`: those of them that reach `max_tokens` with it.
    `prompt_states`: copies of states after this step that were requested, by slot. `rows`, `tags`: `slots` and the tags
    that they had. `num_rounds`: tokens that it may sample for each. `paused`: slots that skipped it.
    """

    plan: Plan
    sequences: dict[int, RunningSequence]
    slots: list[int]
    tokens: PendingTokens
    ending: set[int]
    prompt_states: dict[int, State]
    rows: npt.NDArray[np.int64]
    tags: npt.NDArray[np.int64]
    num_rounds: int = 1
    paused: set[int] = dataclasses.field(default_factory=set)
    launched_at: float = dataclasses.field(default_factory=time.monotonic)

    def wait(self) -> npt.NDArray[np.int64]:
        """[num_rounds, len(slots)]: see PendingTokens."""
        return self.tokens.wait()

    def has(self, slot: int, sequence: RunningSequence) -> bool:
        """Whether the step is computed for this sequence, as far as the host knows."""
        return self.sequences.get(slot) is sequence and slot not in self.paused

    def has_any(self, running: Mapping[int, RunningSequence]) -> bool:
        """Whether one of its sequences is still running."""
        return any(running.get(slot) is sequence for slot, sequence in self.sequences.items())

    def without_ending(self, plan: Plan) -> Plan:
        """The plan for the next step, without the slots that end with this one."""
        if not self.ending:
            return plan
        return dataclasses.replace(plan, decode=tuple(slot for slot in plan.decode if slot not in self.ending))

    def pause(self, slot: int, sequence: RunningSequence) -> None:
        """The sequence's last token, now known, was one of its pausing ids."""
        if self.has(slot, sequence):
            sequence.landed()
            self.paused.add(slot)
            self.ending.discard(slot)

    def effective_plan(self, running: Mapping[int, RunningSequence]) -> Plan:
        """The plan without sequences that paused or ended; tokens read for those are not counted."""
        gone = {slot for slot, sequence in self.sequences.items() if running.get(slot) is not sequence} | self.paused
        if not gone:
            return self.plan
        return Plan(
            decode=tuple(slot for slot in self.plan.decode if slot not in gone),
            prefill=tuple(chunk for chunk in self.plan.prefill if chunk.slot not in gone),
        )


class OverlapBlockers:
    """The running requests that keep steps from overlapping. A SlotListener."""

    def __init__(self, overlap: Overlap | None, token_rows: TokenRows) -> None:
        """`overlap`: that of the executor; None: steps never overlap. `token_rows`: of the running requests."""
        self._overlap, self._token_rows = overlap, token_rows
        self._slots: set[int] = set()

    def open(self, slot: int, sequence: RunningSequence) -> None:
        self.update(slot, sequence)

    def update(self, slot: int, sequence: RunningSequence) -> None:
        """After a token of the slot: its request may block from now on."""
        if not may_overlap(sequence):
            self._slots.add(slot)

    def refresh(self, running: Mapping[int, RunningSequence]) -> None:
        """After a step: requests that blocked may no longer do so."""
        self._slots = {slot for slot in self._slots if not may_overlap(running[slot])}

    def close(self, slot: int) -> None:
        self._slots.discard(slot)

    def allow(self, plan: Plan, sequences: Mapping[str, RunningSequence]) -> bool:
        """Whether this plan may be launched without waiting. `sequences`: by request id."""
        if self._overlap is None or self._slots:
            return False
        if self.num_rounds(plan):
            return True
        if len(plan.decode) + len(plan.prefill) < self._overlap.min_rows:
            return False
        return all(may_overlap(sequences[assignment.request_id]) for assignment in plan.admitted)

    def num_rounds(self, plan: Plan) -> int:
        """Tokens that one launch of this plan may sample for each of its rows, if the plan is allowed: while no prompt
        is read and all tokens are plain. 0: the launch must be a plain step.
        """
        if self._overlap is None or plan.prefill or plan.admitted or not plan.decode:
            return 0
        most = self._overlap.most_rounds(len(plan.decode))
        return self._token_rows.most_rounds(np.array(plan.decode, np.int64), most)

    def defer_prompts(self, plan: Plan, sequences: Mapping[str, RunningSequence]) -> Plan:
        """The plan behind a step that reads prompts: without those that it reads itself, if they are few and the
        others can have several tokens meanwhile. So requests that come one by one do not make every step one for
        prompts. `sequences`: by request id.
        """
        if sum(chunk.length for chunk in plan.prefill) > FEW_PROMPT_TOKENS:
            return plan
        without = dataclasses.replace(plan, admitted=(), prefill=())
        return without if self.num_rounds(without) > 1 and self.allow(without, sequences) else plan


def next_inputs(
    slots: Sequence[int],
    singles: Sequence[Chunk],
    sequences: Mapping[int, RunningSequence],
    before: InFlightStep | None,
) -> NextInputs:
    """The ids that `slots` read: a prompt token for `singles`, else the token sampled last, mostly in `before`."""
    sampled_in = [] if before is None else before.slots
    paused = set() if before is None else before.paused
    if not singles and not paused and slots == sampled_in:  # the same rows as in the step before
        sources, ids = np.arange(len(slots)), np.zeros(len(slots), np.int64)
    else:
        given = {chunk.slot: sequences[chunk.slot].read_ids[chunk.start] for chunk in singles}
        sources = _positions(slots, sampled_in)
        sources[[index for index, slot in enumerate(slots) if slot in given or slot in paused]] = -1
        ids = np.zeros(len(slots), np.int64)
        for index in np.flatnonzero(sources < 0).tolist():
            slot = slots[index]
            ids[index] = given[slot] if slot in given else sequences[slot].sampled[-1]
    return NextInputs(ids, sources, before.tokens.ids if before is not None and sampled_in else None)


def _positions(slots: Sequence[int], among: Sequence[int]) -> npt.NDArray[np.int64]:
    """The place of each of `slots` among those, -1 where it is not there."""
    positions = np.full(max((*slots, *among), default=0) + 1, -1, np.int64)
    positions[np.array(among, np.int64)] = np.arange(len(among))
    return positions[np.array(slots, np.int64)]
