"""One work in the process that owns it."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Generic, TypeVar

from service.work.library import WorkLibrary
from service.work.ownership import Ownership, OwnershipLost
from service.work.work import Work

WorkT = TypeVar("WorkT", bound=Work)


@dataclasses.dataclass(slots=True, kw_only=True)
class WorkRun(abc.ABC, Generic[WorkT]):
    """`work`: as it was last read or written. `owner`: the name of this process. `beat_s`: between two signs of
    life.
    """

    library: WorkLibrary[WorkT]
    work: WorkT
    owner: str
    beat_s: float

    @abc.abstractmethod
    async def run(self) -> None:
        """To the work's end. Raises OwnershipLost, or NsmError where the store fails: then somebody goes on later."""

    def wake(self) -> None:
        """Somebody may have changed the work."""

    async def _change(self, change: Callable[[WorkT], WorkT]) -> None:
        """Changes the work, with a sign of life. Raises OwnershipLost."""

        def with_beat(work: WorkT) -> WorkT:
            if work.ownership is None or work.ownership.owner != self.owner:
                raise OwnershipLost
            ownership = Ownership(owner=self.owner, beat=work.ownership.beat + 1)
            return dataclasses.replace(change(work), ownership=ownership)

        self.work = await self.library.change(self.work.tenant, self.work.id, with_beat)
