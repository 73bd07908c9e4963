"""The ids of a tenant's files, or of its batches, in the order of their creation: one document."""

from __future__ import annotations

from collections.abc import Callable

from nsm_core.errors import InvalidRequest, VersionConflict
from service.stores.records.base import ABSENT, RecordStore

MAX_IDS = 2000
MAX_TRIES = 50  # of a change that another writer was faster with


async def ids_of(records: RecordStore, tenant: str, name: str) -> list[str]:
    """The oldest first."""
    found = await records.get(tenant=tenant, kind="index", record_id=name)
    return [] if found is None else list(found.document["ids"])


async def add_id(records: RecordStore, tenant: str, name: str, new_id: str, *, is_bounded: bool = True) -> None:
    """Adds it at the end, if it is not there. Raises InvalidRequest when there are too many, if that is to count."""

    def change(ids: list[str]) -> list[str]:
        if is_bounded and new_id not in ids and len(ids) >= MAX_IDS:
            raise InvalidRequest(f"this tenant has {MAX_IDS} {name}, the maximum: delete some")
        return ids if new_id in ids else [*ids, new_id]

    await _change(records, tenant, name, change)


async def remove_id(records: RecordStore, tenant: str, name: str, old_id: str) -> None:
    """Nothing happens if it is not there."""
    await _change(records, tenant, name, lambda ids: [one for one in ids if one != old_id])


async def _change(
    records: RecordStore, tenant: str, name: str, change: Callable[[list[str]], list[str]]
) -> None:  # fmt: skip
    for number in range(1, MAX_TRIES + 1):
        found = await records.get(tenant=tenant, kind="index", record_id=name)
        before, version = ([], ABSENT) if found is None else (list(found.document["ids"]), found.version)
        after = change(before)
        if after == before:
            return
        try:
            await records.put(
                tenant=tenant, kind="index", record_id=name, document={"ids": after}, expected_version=version
            )
        except VersionConflict:
            if number == MAX_TRIES:
                raise
        else:
            return
