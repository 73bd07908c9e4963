"""Fine-tuning jobs in the record store: each a document, one list of each tenant's, and one of all that are open."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nsm_core.errors import NsmError, QuotaExceeded, VersionConflict
from service.batches.library import EVERYBODY
from service.files.index import MAX_IDS, MAX_TRIES, add_id, ids_of, remove_id
from service.stores.records.base import RecordStore
from service.tuning.job import Job, job_not_found

INDEX = "fine_tuning_jobs"
MAX_OPEN = 8  # jobs of one tenant that have not ended


class JobLibrary:
    """Of one application."""

    def __init__(self, records: RecordStore) -> None:
        self._records = records

    async def add(self, job: Job) -> Job:
        """It will be run when this returns. Raises QuotaExceeded when the tenant has too many that have not ended."""
        known = await self.list_all(job.tenant)
        num_open = sum(not one.has_ended for one in known)
        if num_open >= MAX_OPEN:
            raise QuotaExceeded(
                f"a tenant has at most {MAX_OPEN} fine-tuning jobs that have not ended, and has them all"
            )
        if len(known) >= MAX_IDS:
            await self._forget(next(one for one in known if one.has_ended))
        await add_id(self._records, job.tenant, INDEX, job.id)
        added = await self._put(job)
        await add_id(self._records, EVERYBODY, INDEX, f"{job.id} {job.tenant}", is_bounded=False)
        return added

    async def _forget(self, job: Job) -> None:
        await remove_id(self._records, job.tenant, INDEX, job.id)
        await self._records.delete(tenant=job.tenant, kind="tuning", record_id=job.id)

    async def get(self, tenant: str, job_id: str) -> Job:
        """Raises NotFound."""
        found = await self._records.get(tenant=tenant, kind="tuning", record_id=job_id)
        if found is None:
            raise job_not_found(job_id)
        return Job.from_record(tenant, found)

    async def list_all(self, tenant: str) -> Sequence[Job]:
        """All of a tenant's, the oldest first."""
        ids = await ids_of(self._records, tenant, INDEX)
        found = await self._records.get_many(tenant=tenant, kind="tuning", record_ids=ids)
        return [Job.from_record(tenant, one) for one in found if one is not None]

    async def list_open(self) -> Sequence[tuple[str, str]]:
        """Tenant and id of all that have not ended, the oldest first."""
        entries = [entry.partition(" ") for entry in await ids_of(self._records, EVERYBODY, INDEX)]
        return [(tenant, job_id) for job_id, _, tenant in entries]

    async def close(self, tenant: str, job_id: str) -> None:
        """It has ended."""
        await remove_id(self._records, EVERYBODY, INDEX, f"{job_id} {tenant}")

    async def change(self, tenant: str, job_id: str, change: Callable[[Job], Job | None]) -> Job:
        """The job after `change`, which may be called again with a newer one; None: it stays as it is."""
        for _ in range(MAX_TRIES):
            job = await self.get(tenant, job_id)
            changed = change(job)
            if changed is None:
                return job
            try:
                return await self._put(changed)
            except VersionConflict:
                continue
        raise NsmError(f"fine-tuning job {job_id!r} is changed all the time")

    async def _put(self, job: Job) -> Job:
        await self._records.put(
            tenant=job.tenant,
            kind="tuning",
            record_id=job.id,
            document=job.to_document(),
            expected_version=job.version,
        )
        return await self.get(job.tenant, job.id)
