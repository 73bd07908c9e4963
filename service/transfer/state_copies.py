"""Named states of a whole store as values that can be written into another one: for backups and copies."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any, Literal

from nsm_core.errors import InvalidRequest, NotFound, SnapshotCorrupt
from service.stores.states.base import NamedState, StateStore, StoredState
from service.transfer.session_file import read_file

MAX_VERSION = 2**53 - 1  # numbers of JSON and Lua end there
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_TEXT_BYTES = 8  # length of the text's bytes, before the file
_FIELDS = ("tenant", "name", "version", "created_at", "model_fingerprint", "position", "num_tokens", "source")


@dataclasses.dataclass(frozen=True, slots=True)
class StateCopy:
    """A version of a name. `newest`: the highest number that the name ever had, deleted versions included."""

    stored: StoredState
    newest: int


async def all_states(states: StateStore, *, tenant: str | None = None) -> list[NamedState]:
    """In the order in which they can be made again: published ones after all tenants', versions rising."""
    found: list[NamedState] = []
    for owner in await states.list_tenants() if tenant is None else (tenant,):
        found += sorted(await states.list(tenant=owner), key=lambda state: (state.name, state.version))
    return found


async def read_state(states: StateStore, head: NamedState) -> StateCopy:
    """Raises NotFound for one that was deleted meanwhile, SnapshotCorrupt for one that is damaged."""
    stored = await states.load(tenant=head.tenant, name=head.name, version=head.version)
    if stored is None:
        raise NotFound(f"state {head.reference!r} does not exist", code="state_not_found")
    require_sound(stored)
    return StateCopy(stored, await states.newest_version(tenant=head.tenant, name=head.name))


def require_sound(stored: StoredState) -> None:
    """Raises SnapshotCorrupt unless the bytes are the state that the fields describe."""
    head = stored.head
    try:
        file = read_file(stored.file, kind="state")
    except InvalidRequest as error:
        raise SnapshotCorrupt(f"the state {head.reference!r} is damaged: {error}") from error
    snapshot = file.snapshot
    if snapshot is None:
        raise SnapshotCorrupt(f"the state {head.reference!r} is damaged: its file has no state")
    owner = (snapshot.header.tenant, snapshot.header.session_id, file.header.session_id)
    if owner != (head.tenant, head.name, head.name):
        raise SnapshotCorrupt(f"the state {head.reference!r} is damaged: its file is another state's")
    found = (file.header.model_fingerprint, file.header.position, len(file.log_ids))
    if found != (head.model_fingerprint, head.position, head.num_tokens):
        raise SnapshotCorrupt(f"the state {head.reference!r} is damaged: its fields are not those of its file")


async def restore_state(
    states: StateStore, copy: StateCopy, *, is_overwriting: bool
) -> Literal["written", "replaced", "same", "exists"]:
    """Makes the version under its own number and reads it back. Another one of the number stays (`exists`): it may be
    in use, and a version is said never to change.

    `is_overwriting`: a stored version that cannot be read is replaced. Raises VersionConflict for a name that is
    published, and SnapshotCorrupt where the stored version cannot be read.
    """
    head = copy.stored.head
    key: dict[str, Any] = {"tenant": head.tenant, "name": head.name, "version": head.version}
    is_new = await states.restore(copy.stored, newest=copy.newest)
    try:
        found = await states.load(**key)
        if found is None:
            raise SnapshotCorrupt(f"state {head.reference!r} was deleted while it was restored")
        require_sound(found)
    except SnapshotCorrupt:
        if is_new or not is_overwriting:
            raise
        await states.delete(**key)
        await restore_state(states, copy, is_overwriting=False)
        return "replaced"
    is_equal = _content(found) == _content(copy.stored)
    if is_new and not is_equal:
        raise SnapshotCorrupt(f"state {head.reference!r} was read back as something else than was written")
    if is_new:
        return "written"
    return "same" if is_equal else "exists"


def _content(stored: StoredState) -> tuple[object, ...]:
    """All but the time."""
    head = stored.head
    fields = (head.model_fingerprint, head.position, head.num_tokens, head.source, dict(head.metadata))
    return (*fields, stored.file, stored.text)


def encode_state(copy: StateCopy) -> tuple[dict[str, Any], bytes]:
    """Fields for JSON, and bytes: the text's length, the text, the file."""
    head, text = copy.stored.head, copy.stored.text
    fields = {name: getattr(head, name) for name in _FIELDS}
    more = {"metadata": dict(head.metadata), "newest": copy.newest, "has_text": text is not None}
    raw_text = (text or "").encode()
    return {**fields, **more}, len(raw_text).to_bytes(_TEXT_BYTES, "little") + raw_text + copy.stored.file


def decode_state(fields: Mapping[str, Any], raw: bytes) -> StateCopy:
    """The inverse of `encode_state`. Raises SnapshotCorrupt, ValueError, TypeError or KeyError for anything else."""
    file_start = _TEXT_BYTES + int.from_bytes(raw[:_TEXT_BYTES], "little")
    if file_start > len(raw):
        raise ValueError("a state's text is longer than its entry")
    text, file = raw[_TEXT_BYTES:file_start].decode(), raw[file_start:]
    metadata, version, newest = fields["metadata"], fields["version"], fields["newest"]
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("a state's metadata are not texts")
    if not (isinstance(version, int) and isinstance(newest, int) and 1 <= version <= newest <= MAX_VERSION):
        raise ValueError("a state's version is out of range")
    if _NAME.fullmatch(fields["name"]) is None:
        raise ValueError(f"{json.dumps(fields['name'])} is no name of a state")
    head = NamedState(
        tenant=str(fields["tenant"]),
        name=fields["name"],
        version=version,
        created_at=float(fields["created_at"]),
        model_fingerprint=str(fields["model_fingerprint"]),
        position=int(fields["position"]),
        num_tokens=int(fields["num_tokens"]),
        num_bytes=len(file) + file_start - _TEXT_BYTES,
        source=str(fields["source"]),
        metadata=metadata,
    )
    copy = StateCopy(StoredState(head=head, file=file, text=text if fields["has_text"] else None), newest)
    require_sound(copy.stored)
    return copy
