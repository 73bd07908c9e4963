"""The states of slots that have read drafts: taken back where drafts were refused, and behind their text then."""

from __future__ import annotations

from nsm_core.engine.sequence import RunningSequence
from nsm_core.execution.base import Savepoint


class DraftedStates:
    """Of one runner. What a state was before a step can be had until the next one begins."""

    def __init__(self) -> None:
        self._savepoints: dict[int, tuple[Savepoint, int]] = {}  # by slot, with the sampled tokens it had read
        self._behind: set[int] = set()

    @property
    def has_behind(self) -> bool:
        """Whether a state has more to read than the token sampled last."""
        return bool(self._behind)

    def begin_step(self) -> None:
        self._savepoints.clear()

    def begin(self, slot: int, sequence: RunningSequence, savepoint: Savepoint) -> None:
        """The slot is about to read all of its text, and drafts."""
        self._savepoints[slot] = savepoint, sequence.num_fed
        self.catch_up(slot, sequence)

    def catch_up(self, slot: int, sequence: RunningSequence) -> None:
        """The slot reads all of its text."""
        sequence.num_fed_before_drafts = None
        self._behind.discard(slot)

    def take_back(self, slot: int, sequence: RunningSequence) -> None:
        """The state is what it was before the drafts of the last step, if it had any, and so behind its text."""
        if slot in self._savepoints:
            savepoint, sequence.num_fed_before_drafts = self._savepoints.pop(slot)
            savepoint.restore()
            self._behind.add(slot)

    def remove(self, slot: int) -> None:
        """The slot's request is over."""
        self._savepoints.pop(slot, None)
        self._behind.discard(slot)
