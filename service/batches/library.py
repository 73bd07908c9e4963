"""Batches in the record store: each a document, one list of each tenant's, and one of all that have not ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nsm_core.errors import NsmError, VersionConflict
from service.batches.batch import KEEP_LINES_S, Batch, batch_not_found
from service.batches.requests import is_failed
from service.files.index import MAX_IDS, MAX_TRIES, add_id, ids_of, remove_id
from service.stores.records.base import ABSENT, RecordStore

INDEX = "batches"
EVERYBODY = "*"  # the owner of the list of open batches; no tenant can have this name
RESULTS_AT_ONCE = 100  # that are read in one trip


class BatchLibrary:
    """Of one application."""

    def __init__(self, records: RecordStore) -> None:
        self._records = records

    async def add(self, batch: Batch) -> Batch:
        """It will be run when this returns. Raises InvalidRequest when the tenant has too many."""
        await self._make_room(batch.tenant)
        await add_id(self._records, batch.tenant, INDEX, batch.id)
        added = await self._put(batch)
        await add_id(self._records, EVERYBODY, INDEX, f"{batch.id} {batch.tenant}", is_bounded=False)
        return added

    async def _make_room(self, tenant: str) -> None:
        """Deletes the oldest batch that has ended, where the tenant has as many as there may be."""
        if len(await ids_of(self._records, tenant, INDEX)) < MAX_IDS:
            return
        oldest = next((batch for batch in await self.list_all(tenant) if batch.has_ended), None)
        if oldest is not None:
            await remove_id(self._records, tenant, INDEX, oldest.id)
            await self._records.delete(tenant=tenant, kind="batch", record_id=oldest.id)

    async def get(self, tenant: str, batch_id: str) -> Batch:
        """Raises NotFound."""
        found = await self._records.get(tenant=tenant, kind="batch", record_id=batch_id)
        if found is None:
            raise batch_not_found(batch_id)
        return Batch.from_record(tenant, found)

    async def list_all(self, tenant: str) -> Sequence[Batch]:
        """All of a tenant's, the oldest first."""
        ids = await ids_of(self._records, tenant, INDEX)
        found = await self._records.get_many(tenant=tenant, kind="batch", record_ids=ids)
        return [Batch.from_record(tenant, one) for one in found if one is not None]

    async def list_open(self) -> Sequence[tuple[str, str]]:
        """Tenant and id of all that have not ended, the oldest first."""
        entries = [entry.partition(" ") for entry in await ids_of(self._records, EVERYBODY, INDEX)]
        return [(tenant, batch_id) for batch_id, _, tenant in entries]

    async def close(self, batch: Batch) -> None:
        """It has ended."""
        await remove_id(self._records, EVERYBODY, INDEX, f"{batch.id} {batch.tenant}")

    async def change(self, tenant: str, batch_id: str, change: Callable[[Batch], Batch | None]) -> Batch:
        """The batch after `change`, which may be called again with a newer one; None: it stays as it is."""
        for _ in range(MAX_TRIES):
            batch = await self.get(tenant, batch_id)
            changed = change(batch)
            if changed is None:
                return batch
            try:
                return await self._put(changed)
            except VersionConflict:
                continue
        raise NsmError(f"batch {batch_id!r} is changed all the time")

    async def _put(self, batch: Batch) -> Batch:
        await self._records.put(
            tenant=batch.tenant,
            kind="batch",
            record_id=batch.id,
            document=batch.to_document(),
            expected_version=batch.version,
        )
        return await self.get(batch.tenant, batch.id)

    async def put_result(self, batch: Batch, number: int, result: dict[str, Any]) -> None:
        """The result of a line. The first one stays, whoever else ran the same line."""
        try:
            await self._records.put(
                tenant=batch.tenant,
                kind="line",
                record_id=_result_id(batch, number),
                document=result,
                expected_version=ABSENT,
                ttl_s=KEEP_LINES_S,
            )
        except VersionConflict:
            pass

    async def results(self, batch: Batch, numbers: Sequence[int]) -> list[dict[str, Any] | None]:
        """Of at most RESULTS_AT_ONCE lines."""
        names = [_result_id(batch, number) for number in numbers]
        found = await self._records.get_many(tenant=batch.tenant, kind="line", record_ids=names)
        return [None if one is None else dict(one.document) for one in found]

    async def known(self, batch: Batch, num_lines: int) -> dict[int, bool]:
        """The lines that have a result, and whether that is a failure."""
        known: dict[int, bool] = {}
        for start in range(0, num_lines, RESULTS_AT_ONCE):
            numbers = range(start, min(start + RESULTS_AT_ONCE, num_lines))
            for number, result in zip(numbers, await self.results(batch, numbers), strict=True):
                if result is not None:
                    known[number] = is_failed(result)
        return known

    async def forget_results(self, batch: Batch, num_lines: int) -> None:
        """After the files were written."""
        for number in range(num_lines):
            await self._records.delete(tenant=batch.tenant, kind="line", record_id=_result_id(batch, number))


def _result_id(batch: Batch, number: int) -> str:
    return f"{batch.id}.{number}"
