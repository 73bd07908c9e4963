"""Long work in the record store: a document each, one list of each tenant's, and one of all that have not ended."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import ClassVar, Generic, TypeVar

from nsm_core.errors import NotFound, NsmError, VersionConflict
from service.files.index import MAX_TRIES, add_id, ids_of, remove_id
from service.stores.records.base import Kind, RecordStore
from service.work.work import Work

EVERYBODY = "*"  # the owner of the lists of open works; no tenant can have this name

WorkT = TypeVar("WorkT", bound=Work)


class WorkLibrary(abc.ABC, Generic[WorkT]):
    """Of one application. `kind`: of the documents. `index`: the name of the lists. `noun`: for messages."""

    kind: ClassVar[Kind]
    index: ClassVar[str]
    noun: ClassVar[str]
    work_type: type[WorkT]

    def __init__(self, records: RecordStore) -> None:
        self._records = records

    @abc.abstractmethod
    async def _make_room(self, tenant: str) -> None:
        """For one more of the tenant's. May raise QuotaExceeded."""

    @abc.abstractmethod
    def _not_found(self, work_id: str) -> NotFound: ...

    async def add(self, work: WorkT) -> WorkT:
        """It will be run when this returns. Raises InvalidRequest or QuotaExceeded when the tenant has too many."""
        await self._make_room(work.tenant)
        await add_id(self._records, work.tenant, self.index, work.id)
        added = await self._put(work)
        await add_id(self._records, EVERYBODY, self.index, _entry(work), is_bounded=False)
        return added

    async def _forget(self, work: WorkT) -> None:
        await remove_id(self._records, work.tenant, self.index, work.id)
        await self._records.delete(tenant=work.tenant, kind=self.kind, record_id=work.id)

    async def get(self, tenant: str, work_id: str) -> WorkT:
        """Raises NotFound."""
        found = await self._records.get(tenant=tenant, kind=self.kind, record_id=work_id)
        if found is None:
            raise self._not_found(work_id)
        return self.work_type.from_record(tenant, found)

    async def list_all(self, tenant: str) -> Sequence[WorkT]:
        """All of a tenant's, the oldest first."""
        ids = await ids_of(self._records, tenant, self.index)
        found = await self._records.get_many(tenant=tenant, kind=self.kind, record_ids=ids)
        return [self.work_type.from_record(tenant, one) for one in found if one is not None]

    async def list_open(self) -> Sequence[tuple[str, str]]:
        """Tenant and id of all that have not ended, the oldest first."""
        entries = [entry.partition(" ") for entry in await ids_of(self._records, EVERYBODY, self.index)]
        return [(tenant, work_id) for work_id, _, tenant in entries]

    async def close(self, work: WorkT) -> None:
        """It has ended."""
        await remove_id(self._records, EVERYBODY, self.index, _entry(work))

    async def change(self, tenant: str, work_id: str, change: Callable[[WorkT], WorkT | None]) -> WorkT:
        """The work after `change`, which may be called again with a newer one; None: it stays as it is."""
        for _ in range(MAX_TRIES):
            work = await self.get(tenant, work_id)
            changed = change(work)
            if changed is None:
                return work
            try:
                return await self._put(changed)
            except VersionConflict:
                continue
        raise NsmError(f"{self.noun} {work_id!r} changed again and again meanwhile: try again")

    async def _put(self, work: WorkT) -> WorkT:
        await self._records.put(
            tenant=work.tenant,
            kind=self.kind,
            record_id=work.id,
            document=work.to_document(),
            expected_version=work.version,
        )
        return await self.get(work.tenant, work.id)


def _entry(work: Work) -> str:
    return f"{work.id} {work.tenant}"
