"""States of sessions that wait in this process for their next turn, bounded in bytes."""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator

from nsm_core.state.snapshot import Snapshot
from service.stores.sessions.base import KnownVersion, SessionHead
from service.stores.sessions.key import SessionKey

ENTRY_BYTES = 4096  # of an entry beside its state: head, header, penalty counts


@dataclasses.dataclass(slots=True)
class HotState:
    """The state of a session's newest version, as far as this process knows.

    `head`: after that version's commit, with the newest stored snapshot. `used_at`: a `time.monotonic()` reading.
    `is_unused_fork`: of a fork that has had no turn. `border`: the state before the newest turn's answer, where that
    began with a thought: the next message goes on from there.
    """

    head: SessionHead
    snapshot: Snapshot
    used_at: float
    is_unused_fork: bool = False
    border: Snapshot | None = None

    @property
    def known(self) -> KnownVersion:
        return KnownVersion(self.head.created_at, self.head.version)

    @property
    def num_unsaved(self) -> int:
        """Tokens that another process would have to read again, less an answer that began with a thought."""
        return self.to_store.header.position - self.head.snapshot_position

    @property
    def to_store(self) -> Snapshot:
        """The state that another process starts from."""
        return self.border or self.snapshot

    @property
    def num_bytes(self) -> int:
        """Also where the engine holds the state: what it holds for this process is bounded here."""
        border_bytes = 0 if self.border is None else self.border.header.state_bytes
        return self.snapshot.header.state_bytes + border_bytes + ENTRY_BYTES


class HotStates:
    """One state of each session. `put` gives up the oldest of the tenant that holds most, when `max_bytes` are held."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._tenants: dict[str, OrderedDict[SessionKey, HotState]] = {}  # of each, the least recently used first
        self._held: Counter[str] = Counter()  # bytes

    @property
    def num_bytes(self) -> int:
        return self._held.total()

    def __iter__(self) -> Iterator[HotState]:
        for states in self._tenants.values():
            yield from states.values()

    def get(self, key: SessionKey) -> HotState | None:
        states = self._tenants.get(key.tenant)
        return None if states is None else states.get(key)

    def put(self, hot: HotState) -> Iterable[HotState]:
        """Takes the place of the last one. Returns those that had to go: `hot` itself where it is too large."""
        key = hot.head.key
        self.remove(key)
        if hot.num_bytes > self._max_bytes:
            return (hot,)
        self._tenants.setdefault(key.tenant, OrderedDict())[key] = hot
        self._held[key.tenant] += hot.num_bytes
        evicted = []
        while self.num_bytes > self._max_bytes:
            largest = max(self._held, key=lambda tenant: (self._held[tenant], tenant))
            evicted.append(self._tenants[largest][next(iter(self._tenants[largest]))])
            self.remove(evicted[-1].head.key)
        return evicted

    def remove(self, key: SessionKey) -> None:
        """No error when there is none."""
        states = self._tenants.get(key.tenant, OrderedDict[SessionKey, HotState]())
        hot = states.pop(key, None)
        if hot is None:
            return
        self._held[key.tenant] -= hot.num_bytes
        if not states:
            del self._tenants[key.tenant], self._held[key.tenant]
