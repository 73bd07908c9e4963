"""Long work in a store that one process of many runs at a time: batches, fine-tuning jobs."""

from __future__ import annotations

import dataclasses
import time
import uuid
from typing import Any, ClassVar, Protocol, TypeVar

BEATS_PER_TERM = 3  # two may be late before another process takes the work


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ownership:
    """The process that runs a work. `beat` rises while it is alive: clocks of two machines need not agree."""

    owner: str
    beat: int


class OwnershipLost(Exception):
    """Another process runs the work now."""


class Owned(Protocol):
    """A frozen dataclass of the store. `ownership`: None while nobody runs it."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    @property
    def id(self) -> str: ...

    @property
    def ownership(self) -> Ownership | None: ...


WorkT = TypeVar("WorkT", bound=Owned)


class Owner:
    """This process among those that run work. `term_s`: without a sign of life for so long, a work is free again."""

    def __init__(self, term_s: float) -> None:
        self.name = uuid.uuid4().hex
        self.beat_s = term_s / BEATS_PER_TERM
        self._term_s = term_s
        self._seen: dict[str, tuple[Ownership, float]] = {}  # of others, and since when

    def is_free(self, work: Owned) -> bool:
        """Nobody runs it, or nobody who has shown a sign of life for a while."""
        if work.ownership is None:
            return True
        ownership, since = self._seen.get(work.id, (None, 0.0))
        if ownership != work.ownership:
            self._seen[work.id] = (work.ownership, time.monotonic())
            return False
        return time.monotonic() - since > self._term_s

    def forget(self, work: Owned) -> None:
        """Its next owner is looked at anew."""
        self._seen.pop(work.id, None)

    def owns(self, work: Owned) -> bool:
        return work.ownership is not None and work.ownership.owner == self.name

    def taken(self, current: WorkT, before: Ownership | None) -> WorkT | None:
        """`current` as this process's; None if its ownership is no longer `before`."""
        mine = Ownership(owner=self.name, beat=0)
        return dataclasses.replace(current, ownership=mine) if current.ownership == before else None

    def freed(self, current: WorkT) -> WorkT | None:
        """`current` without an owner; None if it is not this process's."""
        return dataclasses.replace(current, ownership=None) if self.owns(current) else None
