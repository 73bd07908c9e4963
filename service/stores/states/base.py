"""The seam between the gateway and whatever keeps named states: start states that never change.

A state has one key, (tenant, name, version). Versions of a name rise from 1 and are never given twice, also when one is
deleted. A state is bytes to the store: see service/named_states.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Protocol

from nsm_core.errors import VersionConflict

PUBLISHED = "*"  # the owner of what the operator publishes; no tenant can have this name


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NewState:
    """What a version is made of. `file`: its bytes. `text`: what was read, where it was a text. `source`: text,
    messages, session or file. `position`: tokens that the state has read; `num_tokens`: those of its log.
    """

    file: bytes
    model_fingerprint: str
    position: int
    num_tokens: int
    source: str
    text: str | None = None
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NamedState:
    """A stored version without its bytes. `num_bytes`: of file and text together; `created_at`: unix seconds."""

    tenant: str
    name: str
    version: int
    created_at: float
    model_fingerprint: str
    position: int
    num_tokens: int
    num_bytes: int
    source: str
    metadata: Mapping[str, str]

    @property
    def reference(self) -> str:
        return f"{self.name}@{self.version}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredState:
    """A version with its bytes."""

    head: NamedState
    file: bytes
    text: str | None


def new_of(stored: StoredState) -> NewState:
    """What a stored version was made of."""
    head = stored.head
    return NewState(
        file=stored.file,
        model_fingerprint=head.model_fingerprint,
        position=head.position,
        num_tokens=head.num_tokens,
        source=head.source,
        text=stored.text,
        metadata=head.metadata,
    )


def published_last(tenants: Iterable[str]) -> tuple[str, ...]:
    """By name. A tenant's own states are restored before published ones of the same name, which would refuse them."""
    return tuple(sorted(tenants, key=lambda tenant: (tenant == PUBLISHED, tenant)))


def name_is_published(name: str) -> VersionConflict:
    """The refusal of a tenant's state with such a name."""
    return VersionConflict(f"the operator has published a state {name!r}: choose another name", param="name")


class StateStore(Protocol):
    """Every call names the tenant: another tenant's states do not exist.

    Lives on the connections of a session store, and is open while that is. Errors: StoreUnavailable, StorageFull,
    SnapshotCorrupt, VersionConflict. Implementations: `sqlite`, `redis`.
    """

    async def add(self, *, tenant: str, name: str, state: NewState) -> NamedState:
        """The next version of the name. Durable when it returns.

        Raises VersionConflict for a name that is published, unless the tenant has a version of it: one reference must
        not mean two. Whoever publishes meanwhile, it is so when this returns.
        """
        ...

    async def get(self, *, tenant: str, name: str, version: int | None = None) -> NamedState | None:
        """`version`: None for the newest there is."""
        ...

    async def load(self, *, tenant: str, name: str, version: int) -> StoredState | None: ...

    async def restore(self, stored: StoredState, *, newest: int) -> bool:
        """A version under its own number and time, durable when it returns; False, and nothing is changed, when the
        tenant has this version of the name. `newest`: the highest number that was ever given, so that none up to it is
        given again.

        Raises VersionConflict as `add` does.
        """
        ...

    async def newest_version(self, *, tenant: str, name: str) -> int:
        """The highest number that was ever given, also when that version was deleted; 0 for an unknown name."""
        ...

    async def list_tenants(self) -> tuple[str, ...]:
        """All that have a state, by name; `PUBLISHED` comes last."""
        ...

    async def list(self, *, tenant: str) -> tuple[NamedState, ...]:
        """All versions of all names, by name, the newest of each first."""
        ...

    async def delete(self, *, tenant: str, name: str, version: int | None = None) -> int:
        """Deletes a version, or all of them; returns how many there were."""
        ...

    async def usage(self, *, tenant: str) -> int:
        """Bytes of the tenant's states."""
        ...
