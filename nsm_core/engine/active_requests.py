"""The requests of an engine that are not over. Plain Python."""

from __future__ import annotations

from nsm_core.engine.scheduler import Plan
from nsm_core.engine.sequence import RunningSequence
from nsm_core.errors import DeadlineExceeded


class LiveRequests:
    """`by_id` has those that wait and those that run, `running` the latter, by slot: both are for reading."""

    def __init__(self) -> None:
        self.by_id: dict[str, RunningSequence] = {}
        self.running: dict[int, RunningSequence] = {}
        self._cancelled: set[str] = set()
        self._with_deadline: set[str] = set()

    def add(self, sequence: RunningSequence) -> None:
        """It waits."""
        request = sequence.request
        self.by_id[request.request_id] = sequence
        if request.deadline is not None:
            self._with_deadline.add(request.request_id)

    def open(self, slot: int, sequence: RunningSequence) -> None:
        """It has got its slot."""
        self.running[slot] = sequence
        sequence.slot = slot

    def remove(self, sequence: RunningSequence) -> None:
        """It is over."""
        request_id = sequence.request.request_id
        del self.by_id[request_id]
        self._with_deadline.discard(request_id)
        if sequence.slot is not None:
            del self.running[sequence.slot]

    def has(self, sequence: RunningSequence) -> bool:
        """Whether it is not over; another one may have its id, or its slot."""
        return self.by_id.get(sequence.request.request_id) is sequence

    def cancel(self, request_id: str) -> None:
        """Nothing where there is no such request."""
        if request_id in self.by_id:
            self._cancelled.add(request_id)

    def cancel_all(self) -> None:
        self._cancelled.update(self.by_id)

    def take_ended(self, now: float) -> list[tuple[RunningSequence, DeadlineExceeded | None]]:
        """Those that were cancelled since the last call, and with an error those whose deadline has passed."""
        if not self._cancelled and not self._with_deadline:
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
        return ended

    def of(self, plan: Plan) -> list[RunningSequence]:
        """Those that take part in it."""
        slots = (*plan.decode, *(chunk.slot for chunk in plan.prefill))
        found = [self.running[slot] for slot in slots if slot in self.running]
        waiting = (self.by_id.get(admission.request_id) for admission in plan.admitted)
        return [*found, *(sequence for sequence in waiting if sequence is not None)]
