"""Slices: several tokens of every decoding row by one call of the executor, while nobody needs Python.

A slice ends with the first token that may end its request or hold text back, when somebody waits (a new request, a
cancellation), and after SLICE_S, so that tokens are never older than that. Events are those of plain steps.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from nsm_core.engine.scheduler import Plan
from nsm_core.engine.sequence import RunningSequence
from nsm_core.execution.base import DecodeInputs
from nsm_core.sampling.device import pack_rows

SLICE_S = 0.02
MAX_ROUNDS = 64  # a bound for memory


class Interrupt:
    """Ends the slice that runs, or the next one after its first round. Any thread may set it."""

    def __init__(self) -> None:
        self.flag = np.zeros(1, np.int32)  # read by the kernels

    def set(self) -> None:
        self.flag[0] = 1

    def clear(self) -> None:
        """Before commands are looked for, so that none comes in between unseen."""
        self.flag[0] = 0


class DecodeSlices:
    """Whether the running requests allow slices. A SlotListener."""

    def __init__(self, *, is_possible: bool) -> None:
        """`is_possible`: whether the executor decodes several tokens in one call."""
        self._is_possible = is_possible
        self._blocking: set[int] = set()
        self.interrupt = Interrupt()

    def open(self, slot: int, sequence: RunningSequence) -> None:
        request = sequence.request
        if not sequence.params.is_plain or request.include_routing or request.sampled_ids:
            self._blocking.add(slot)

    def close(self, slot: int) -> None:
        self._blocking.discard(slot)

    def most_rounds(self, plan: Plan, running: Mapping[int, RunningSequence]) -> int:
        """Of a slice of this plan; 0: a plain step is needed."""
        if not self._is_possible or self._blocking or plan.prefill or plan.admitted:
            return 0
        sequences = [running[slot] for slot in plan.decode]
        if any(sequence.output.is_holding for sequence in sequences):
            return 0
        return min(MAX_ROUNDS, *(sequence.params.max_tokens - len(sequence.sampled) for sequence in sequences))

    def inputs(self, plan: Plan, running: Mapping[int, RunningSequence], most_rounds: int) -> DecodeInputs:
        """Of a slice of the plan's decoding rows."""
        sequences = [running[slot] for slot in plan.decode]
        return DecodeInputs(
            ids=np.array([sequence.sampled[-1] for sequence in sequences], np.int32),
            choices=pack_rows(sequences),
            end_ids=[sequence.output.special_ids for sequence in sequences],
            most_rounds=most_rounds,
            seconds=SLICE_S,
            interrupt=self.interrupt.flag,
        )
