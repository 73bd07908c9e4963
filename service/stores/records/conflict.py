"""The one refusal of all record stores."""

from __future__ import annotations

from nsm_core.errors import VersionConflict


def conflict(kind: str, record_id: str, expected_version: int) -> VersionConflict:
    return VersionConflict(f"{kind} {record_id!r} is not at version {expected_version} any more")
