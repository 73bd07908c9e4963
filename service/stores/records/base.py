"""The seam between the gateway and whatever keeps JSON documents: responses, conversations and their items, files and
batches.

A document has one key, (tenant, kind, id), and a version that every write must name: two writers never overwrite each
other unseen. Unlike a session it has no log and no state; what changes together is one document.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any, Literal, Protocol

# A "chain" document counts the holders of a session: the responses and conversations that need it.
# A "part" is a piece of a file, an "index" has the ids of a tenant's files or batches, a "line" is a result of a batch,
# "tuning" a fine-tuning job.
Kind = Literal["response", "chain", "conversation", "item", "file", "part", "index", "batch", "line", "tuning"]

ABSENT = 0  # the version of a document that does not exist


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A stored document. `version` rises by one with each `put`, from 1."""

    record_id: str
    version: int
    document: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OwnedRecord:
    """A document with its whole key, for whoever moves many."""

    tenant: str
    kind: Kind
    record_id: str
    document: Mapping[str, Any]


class RecordStore(Protocol):
    """Every call names the tenant: another tenant's document does not exist. Neither does one whose TTL ran out.

    Lives on the connections of a session store, and is open while that is. Errors: VersionConflict, StoreUnavailable,
    StorageFull. Implementations: `sqlite`, `redis`.
    """

    async def get(self, *, tenant: str, kind: Kind, record_id: str) -> Record | None: ...

    async def get_many(self, *, tenant: str, kind: Kind, record_ids: Sequence[str]) -> tuple[Record | None, ...]:
        """One answer for each id, in order; not one moment's view of them all."""
        ...

    async def put(
        self,
        *,
        tenant: str,
        kind: Kind,
        record_id: str,
        document: Mapping[str, Any],
        expected_version: int,
        ttl_s: float | None = None,
        holds: Collection[str] = (),
    ) -> int:
        """The document's new version, one above `expected_version` (ABSENT: a new document). Durable when it returns.

        `ttl_s`: how long it is kept from now on; None: for ever. `holds`: sessions that get one holder more with it, in
        the same trip. Raises VersionConflict when the document is at another version; then nothing changed.
        """
        ...

    async def let_go(self, *, tenant: str, session_ids: Collection[str]) -> tuple[str, ...]:
        """Each of these sessions gets one holder less. Returns those that have none any more."""
        ...

    async def delete(self, *, tenant: str, kind: Kind, record_id: str) -> bool:
        """Whether there was one; it is gone when this returns."""
        ...

    async def usage(self, *, tenant: str) -> int:
        """Bytes of the tenant's documents, as JSON; one whose TTL ran out counts until it is removed."""
        ...

    def scan(self, *, tenant: str | None = None) -> AsyncIterator[OwnedRecord]:
        """All documents, or one tenant's, in no order; one that is written or deleted meanwhile may be missing."""
        ...

    async def remove_expired(self) -> int:
        """Deletes documents whose TTL ran out; returns their number."""
        ...
