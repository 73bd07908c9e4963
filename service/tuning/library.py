"""Fine-tuning jobs in the record store."""

from __future__ import annotations

from nsm_core.errors import NotFound, QuotaExceeded
from service.files.index import MAX_IDS
from service.tuning.job import Job, job_not_found
from service.work.library import WorkLibrary

MAX_OPEN = 8  # jobs of one tenant that have not ended


class JobLibrary(WorkLibrary[Job]):
    """Of one application."""

    kind, index, noun, work_type = "tuning", "fine_tuning_jobs", "fine-tuning job", Job

    def _not_found(self, work_id: str) -> NotFound:
        return job_not_found(work_id)

    async def _make_room(self, tenant: str) -> None:
        """Raises QuotaExceeded when the tenant has too many that have not ended."""
        known = await self.list_all(tenant)
        num_open = sum(not one.has_ended for one in known)
        if num_open >= MAX_OPEN:
            raise QuotaExceeded(
                f"this tenant has {MAX_OPEN} fine-tuning jobs that have not ended, the maximum: cancel one or wait"
            )
        if len(known) >= MAX_IDS:
            await self._forget(next(one for one in known if one.has_ended))
