"""The smaller forms that an engine runs its model in beside the whole: fewer memory slots, smaller states."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from nsm_core.execution.base import Executor, ExecutorFactory, SequenceModel
from nsm_core.inspection.probe import RoutingProbe
from nsm_core.state.pool import StatePool


@dataclasses.dataclass(frozen=True, slots=True)
class EngineTier:
    """One form: the model, and how it is computed. Its logits are those of the whole model for the same hidden.

    `probe`: tells what its states do, to the requests that ask; None: to nobody.
    """

    model: SequenceModel
    executor: ExecutorFactory
    probe: RoutingProbe | None = None


class TieredSlots:
    """Which executor, and so which pool, each slot's state belongs to: that of the whole model unless it was put
    elsewhere. A slot has the row of its number in one pool.
    """

    def __init__(self, whole: Executor, tiers: Mapping[int, Executor]) -> None:
        """`tiers`: by number of states."""
        self._whole, self._tiers = whole, tiers
        self._smaller: dict[int, Executor] = {}

    @property
    def num_bytes(self) -> int:
        """Of all pools."""
        return sum(executor.pool.num_bytes for executor in (self._whole, *self._tiers.values()))

    def put(self, slot: int, num_states: int | None) -> Executor:
        """The slot is of this tier from now on; None: of the whole model."""
        executor = self._whole if num_states is None else self._tiers[num_states]
        if num_states is not None:
            self._smaller[slot] = executor
        return executor

    def remove(self, slot: int) -> None:
        self.pool(slot).free(slot)
        self._smaller.pop(slot, None)

    def executor(self, slot: int) -> Executor:
        return self._smaller.get(slot, self._whole)

    def pool(self, slot: int) -> StatePool:
        return self.executor(slot).pool

    def split(self, slots: Iterable[int]) -> list[tuple[Executor, list[int]]]:
        """The slots of each executor, in the order given; those of the whole model first, if there are any."""
        if not self._smaller:
            given = list(slots)
            return [(self._whole, given)] if given else []
        groups: dict[int, list[int]] = {}
        for slot in slots:
            groups.setdefault(id(self.executor(slot)), []).append(slot)
        found = [(executor, groups.get(id(executor), [])) for executor in (self._whole, *self._tiers.values())]
        return [(executor, own) for executor, own in found if own]
