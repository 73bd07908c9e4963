"""A fine-tuning job as it is kept: the object that clients see, its events, and who runs it."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from nsm_core.errors import NotFound
from nsm_core.tuning.config import TuneConfig
from service.messages import quoted
from service.work.work import Work

MAX_EVENTS = 200  # a run has some 20 reports; the oldest go first
_DEFAULT = TuneConfig()
AUTO_EPOCHS, AUTO_BATCH, BASE_RATE = _DEFAULT.num_epochs, _DEFAULT.batch_size, _DEFAULT.rate


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job(Work):
    """`events`: the oldest first. `name`: of the state that it makes."""

    end_statuses = ("succeeded", "failed", "cancelled")

    events: Sequence[Mapping[str, Any]]
    name: str

    @property
    def is_paused(self) -> bool:
        return self.status == "paused"

    @property
    def is_active(self) -> bool:
        return not self.has_ended and not self.is_paused

    @property
    def config(self) -> TuneConfig:
        """What the process trains with."""
        given = self.fields["hyperparameters"]
        return TuneConfig(
            num_epochs=given["n_epochs"],
            batch_size=given["batch_size"],
            rate=BASE_RATE * given["learning_rate_multiplier"],
            seed=self.fields["seed"],
        )

    def ended(self, status: str, **fields: Any) -> Job:
        return self.changed(status=status, finished_at=int(time.time()), estimated_finish=None, **fields)

    def failed(self, code: str, message: str, param: str | None = None) -> Job:
        error = {"code": code, "message": message, "param": param}
        return self.ended("failed", error=error).with_event(message, level="error")

    def paused(self) -> Job:
        return self.changed(status="paused", estimated_finish=None).with_event("the job was paused")

    def resumed(self) -> Job:
        return self.changed(status="queued").with_event("the job was resumed and waits for its turn")

    def with_event(self, message: str, *, level: str = "info", data: Mapping[str, Any] | None = None) -> Job:
        """With one event more; one with `data` is of the type `metrics`."""
        event = {
            "id": f"ftevent-{uuid.uuid4().hex}",
            "object": "fine_tuning.job.event",
            "created_at": int(time.time()),
            "level": level,
            "message": message,
            "type": "message" if data is None else "metrics",
            "data": None if data is None else dict(data),
        }
        return dataclasses.replace(self, events=[*self.events, event][-MAX_EVENTS:])


def new_job(
    tenant: str,
    *,
    model: str,
    training_file: str,
    validation_file: str | None,
    hyperparameters: Mapping[str, Any],
    seed: int,
    name: str,
    metadata: Mapping[str, str],
) -> Job:
    """One that nobody has looked at yet."""
    fields = {
        "id": f"ftjob-{uuid.uuid4().hex}",
        "object": "fine_tuning.job",
        "created_at": int(time.time()),
        "finished_at": None,
        "estimated_finish": None,
        "status": "queued",
        "model": model,
        "fine_tuned_model": None,
        "training_file": training_file,
        "validation_file": validation_file,
        "hyperparameters": dict(hyperparameters),
        "method": {"type": "supervised", "supervised": {"hyperparameters": dict(hyperparameters)}},
        "seed": seed,
        "trained_tokens": None,
        "error": None,
        "result_files": [],
        "integrations": [],
        "organization_id": tenant,
        "metadata": dict(metadata) or None,
    }
    return Job(tenant=tenant, fields=fields, events=[], name=name).with_event("the job waits for its turn")


def job_not_found(job_id: str, *, param: str = "fine_tuning_job_id") -> NotFound:
    """The same answer for an id that never was, or is another tenant's."""
    return NotFound(f"fine-tuning job {quoted(job_id)} does not exist", param=param, code="fine_tuning_job_not_found")
