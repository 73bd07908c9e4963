"""The seam between the gateway and whatever keeps states of prompts' beginnings.

A cache, not a store of record: anything in it may vanish at any time, and nothing is ever wrong because of that. It
bounds itself, in bytes and in time, whatever else the server behind it keeps.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PrefixKey:
    """The name of an entry: the state after the first `position` ids of some prompts.

    `digest` is of the tenant, the model, its numerics class and those ids. `family` is that of the first MIN_TOKENS
    ids: entries that may fit a prompt have its family, and so are found together.
    """

    family: str
    position: int
    digest: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PrefixBounds:
    """Bytes of all entries together, and seconds that an entry stays after its last use."""

    max_bytes: int
    ttl_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PrefixUsage:
    """The room of all entries."""

    num_entries: int
    num_bytes: int


class PrefixStore(Protocol):
    """Every call names the tenant: another tenant's entries do not exist, and no call takes longer because of them.

    A full store drops the least recently used entry of the tenant with most bytes: no tenant loses anything below an
    equal share.

    Errors: StoreUnavailable, StorageFull. Implementations: `memory`, `redis`.
    """

    async def open(self) -> None:
        """Raises StoreUnavailable or ConfigError."""
        ...

    async def close(self) -> None:
        """Idempotent."""
        ...

    async def find(self, *, tenant: str, family: str) -> tuple[PrefixKey, ...]:
        """The keys of one family that did not expire, in no order."""
        ...

    async def load(self, *, tenant: str, key: PrefixKey) -> bytes | None:
        """The entry, as it was put; None when there is none (any more). It counts as used now."""
        ...

    async def put(self, *, tenant: str, key: PrefixKey, entry: bytes) -> None:
        """Keep the entry, in the place of one that has its key, and drop others as the bounds demand.

        An entry that is larger than a bound is not kept.
        """
        ...

    async def remove(self, *, tenant: str, key: PrefixKey) -> None:
        """Idempotent."""
        ...

    async def usage(self, *, tenant: str) -> PrefixUsage: ...

    async def remove_expired(self) -> int:
        """Deletes entries that were not used for the TTL; returns their number. Called about once a minute."""
        ...
