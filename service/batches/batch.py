"""A batch as it is stored: the object that clients see, and its owner."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Mapping
from typing import Any

from nsm_core.errors import NotFound
from service.messages import quoted
from service.work.work import Work

WINDOW_S = {"24h": 86_400}
KEEP_LINES_S = 7 * 86_400  # of results whose batch was never finished


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batch(Work):
    """`output_ttl_s`: of its output files; None: they stay. `models`: the fingerprint of each model that its lines
    name, as it was when the batch began ("": of the lines that name none).
    """

    end_statuses = ("completed", "failed", "expired", "cancelled")

    output_ttl_s: int | None = None
    models: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def is_cancelled(self) -> bool:
        """Whether somebody asked for its end."""
        return self.status == "cancelling"

    def is_expired(self) -> bool:
        return bool(time.time() > self.fields["expires_at"])

    def now(self, status: str, **fields: Any) -> Batch:
        """With a new status and its time."""
        return self.changed(status=status, **{f"{status}_at": int(time.time())}, **fields)

    def begun(self, models: Mapping[str, str]) -> Batch:
        """With `models`, while it has no result."""
        begun = self.now("in_progress") if self.status == "validating" else self
        return dataclasses.replace(begun, models=models)


def new_batch(
    tenant: str,
    *,
    endpoint: str,
    input_file_id: str,
    completion_window: str,
    metadata: Mapping[str, str],
    output_ttl_s: int | None,
) -> Batch:
    """One that nobody has looked at yet."""
    now = int(time.time())
    times = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    fields = {
        "id": f"batch_{uuid.uuid4().hex}",
        "object": "batch",
        "endpoint": endpoint,
        "errors": None,
        "input_file_id": input_file_id,
        "completion_window": completion_window,
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now,
        "expires_at": now + WINDOW_S[completion_window],
        **{f"{name}_at": None for name in times},
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": dict(metadata) or None,
    }
    return Batch(tenant=tenant, fields=fields, output_ttl_s=output_ttl_s)


def batch_not_found(batch_id: str) -> NotFound:
    """The same answer for an id that never was, or is another tenant's."""
    return NotFound(f"batch {quoted(batch_id)} does not exist", param="batch_id", code="batch_not_found")
