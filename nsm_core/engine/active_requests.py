"""The requests of an engine that have not ended. Plain Python."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from nsm_core.engine.scheduler import Plan
from nsm_core.engine.sequence import RunningSequence
from nsm_core.errors import DeadlineExceeded


class SlotListener(Protocol):
    """A part of the engine with data for each running request."""

    def open(self, slot: int, sequence: RunningSequence) -> None:
        """The request has got its slot."""
        ...

    def close(self, slot: int) -> None:
        """The request of this slot has ended; the listener may have no data for it."""
        ...


class ActiveRequests:
    """`by_id`: waiting and running requests. `running`: the running ones, by slot. Callers only read both."""

    def __init__(self, listeners: Sequence[SlotListener] = ()) -> None:
        """`listeners`: opened in order. One that raises holds no data for the request; later ones are not opened."""
        self._listeners = listeners
        self.by_id: dict[str, RunningSequence] = {}
        self.running: dict[int, RunningSequence] = {}
        self._cancelled: set[str] = set()
        self._first_deadline = math.inf  # of all requests, or earlier

    def add(self, sequence: RunningSequence) -> None:
        """Adds a waiting request."""
        request = sequence.request
        self.by_id[request.request_id] = sequence
        if request.deadline is not None:
            self._first_deadline = min(self._first_deadline, request.deadline)

    def start(self, slot: int, sequence: RunningSequence) -> None:
        """The request leaves the queue for `slot`. Raises what the first listener raises; then it still waits."""
        for listener in self._listeners:
            listener.open(slot, sequence)
        self.running[slot] = sequence
        sequence.slot = slot

    def remove(self, sequence: RunningSequence) -> None:
        """Removes a request that ends."""
        request_id = sequence.request.request_id
        del self.by_id[request_id]
        if sequence.slot is not None:
            del self.running[sequence.slot]
            for listener in self._listeners:
                listener.close(sequence.slot)

    def has(self, sequence: RunningSequence) -> bool:
        """Whether this very sequence is active; another one may have its id or its slot."""
        return self.by_id.get(sequence.request.request_id) is sequence

    def cancel(self, request_id: str) -> None:
        """Marks a request as cancelled; an unknown id is ignored."""
        if request_id in self.by_id:
            self._cancelled.add(request_id)

    def cancel_all(self) -> None:
        self._cancelled.update(self.by_id)

    def pop_ended(self, now: float) -> list[tuple[RunningSequence, DeadlineExceeded | None]]:
        """Requests cancelled since the last call, and, with an error, requests whose deadline has passed."""
        if not self._cancelled and now < self._first_deadline:
            return []
        ended: list[tuple[RunningSequence, DeadlineExceeded | None]] = []
        for request_id, sequence in self.by_id.items():
            deadline = sequence.request.deadline
            if request_id in self._cancelled:
                ended.append((sequence, None))
            elif deadline is not None and now >= deadline:
                error = DeadlineExceeded(f"the deadline passed after {len(sequence.sampled)} tokens")
                ended.append((sequence, error))
        self._cancelled.clear()
        later = [sequence.request.deadline for sequence in self.by_id.values()]
        self._first_deadline = min((at for at in later if at is not None and at > now), default=math.inf)
        return ended

    def in_plan(self, plan: Plan) -> list[RunningSequence]:
        """The sequences that take part in the plan."""
        slots = (*plan.decode, *(chunk.slot for chunk in plan.prefill))
        found = [self.running[slot] for slot in slots if slot in self.running]
        waiting = (self.by_id.get(assignment.request_id) for assignment in plan.admitted)
        return [*found, *(sequence for sequence in waiting if sequence is not None)]
