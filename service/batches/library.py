"""Batches in the record store, and the results of their lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nsm_core.errors import InvalidRequest, NotFound, VersionConflict
from service.batches.batch import KEEP_LINES_S, Batch, batch_not_found
from service.batches.requests import is_failed
from service.files.index import MAX_IDS, ids_of
from service.stores.records.base import ABSENT
from service.work.library import WorkLibrary

RESULTS_AT_ONCE = 100  # that are read in one trip


class BatchLibrary(WorkLibrary[Batch]):
    """Of one application."""

    kind, index, noun, work_type = "batch", "batches", "batch", Batch

    def _not_found(self, work_id: str) -> NotFound:
        return batch_not_found(work_id)

    async def _make_room(self, tenant: str) -> None:
        """Deletes the oldest batch that has ended, where the tenant has as many as there may be."""
        if len(await ids_of(self._records, tenant, self.index)) < MAX_IDS:
            return
        oldest = next((batch for batch in await self.list_all(tenant) if batch.has_ended), None)
        if oldest is not None:
            await self._forget(oldest)

    async def cancel(self, tenant: str, batch_id: str) -> Batch:
        """It ends within seconds where a server runs it. Raises NotFound, or InvalidRequest once it has ended."""

        def change(batch: Batch) -> Batch | None:
            if batch.is_cancelled:
                return None
            if batch.status not in ("validating", "in_progress"):
                raise InvalidRequest(f"batch {batch.id!r} is {batch.status}: it cannot be cancelled", param="batch_id")
            return batch.now("cancelling")

        return await self.change(tenant, batch_id, change)

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
