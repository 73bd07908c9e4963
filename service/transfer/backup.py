"""Whole stores: all sessions, documents and named states into a file, out of one, or from store to store."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Literal

from nsm_core.errors import InvalidRequest, NotFound, NsmError, SessionBusy, SnapshotCorrupt, VersionConflict
from nsm_core.state.snapshot import Snapshot
from service.state.copies import SessionCopy, create_copy, read_copy
from service.stores.records.base import ABSENT, OwnedRecord, RecordStore
from service.stores.records.factory import records_beside
from service.stores.sessions.base import SessionStore
from service.stores.sessions.key import SessionKey
from service.stores.states.base import NamedState, StateStore
from service.stores.states.factory import states_beside
from service.transfer.archive import ArchiveWriter, Content, read_archive
from service.transfer.damage import OLDER_BACKUP, damage_of, unreadable_list
from service.transfer.state_copies import StateCopy, all_states, read_state, restore_state

PAGE = 100
ALL = "*"  # in names of what is all tenants'

What = Literal["session", "document", "state"]
Outcome = Literal["written", "replaced", "same", "exists", "gone", "failed"]


@dataclasses.dataclass(frozen=True, slots=True)
class TransferResult:
    """The result for one session, document (of a response or a conversation) or named state. For the session's id, the
    key of a document has its kind and its id, and that of a state "state" and its name@version.

    `same`: it was there already, and equal. `exists`: another one has its id, and was left. `gone`: it was deleted
    meanwhile. `failed`: for the reason that `error` tells. `num_bytes_read`: of the backup, so far.
    """

    name: SessionKey
    outcome: Outcome
    error: NsmError | None = None
    num_bytes_read: int = 0
    what: What = "session"


async def all_sessions(store: SessionStore, *, tenant: str | None = None) -> list[SessionKey]:
    """Oldest first within a tenant, so that whoever makes them again in this order lists them in the same one.

    Raises StoreDamaged, with what is left to do, where the list cannot be read.
    """
    names: list[SessionKey] = []
    with unreadable_list():
        for owner in await store.list_tenants() if tenant is None else (tenant,):
            names += reversed([name async for name in _newest_first(store, owner)])
    return names


async def _newest_first(store: SessionStore, tenant: str) -> AsyncIterator[SessionKey]:
    cursor: str | None = None
    while True:
        page = await store.list(tenant=tenant, limit=PAGE, cursor=cursor)
        for head in page.heads:
            yield head.key
        cursor = page.next_cursor
        if cursor is None:
            return


async def backup(
    store: SessionStore, names: Sequence[SessionKey], path: Path, *, tenant: str | None = None
) -> AsyncGenerator[TransferResult]:
    """Writes the sessions, each as of its newest commit, the documents and the named states, `tenant`'s only if given.

    `path` appears, or is replaced, when all are written.
    A session or a state that cannot be read fails alone; so do the documents from the first one on that cannot be read,
    and the states if their list cannot. Raises StoreUnavailable, or OSError; then `path` is unchanged.
    """
    with _replacing(path) as out:
        archive = ArchiveWriter(out)
        for name in names:
            try:
                copy = await _read_session(store, name)
                await asyncio.to_thread(archive.add, copy)
            except NotFound:
                yield TransferResult(name, "gone")
            except (SnapshotCorrupt, SessionBusy, InvalidRequest) as error:
                yield TransferResult(name, "failed", error)
            else:
                yield TransferResult(name, "written")
        async for owned in _documents(store, tenant):
            if isinstance(owned, OwnedRecord):
                archive.add_document(owned)
                yield TransferResult(_name_of(owned), "written", what="document")
            else:
                yield owned
        async for state in _states(states_beside(store), tenant):
            if isinstance(state, StateCopy):
                archive.add_state(state)
                yield TransferResult(_name_of(state), "written", what="state")
            else:
                yield state
        archive.finish()


async def _read_session(store: SessionStore, name: SessionKey) -> SessionCopy:
    """As `read_copy`; raises SnapshotCorrupt for damaged pages of the store's file too."""
    with damage_of(f"session {name.session_id!r}", remedy=OLDER_BACKUP):
        return await read_copy(store, name)


async def _documents(store: SessionStore, tenant: str | None) -> AsyncGenerator[OwnedRecord | TransferResult]:
    """The documents, then a result if there are more that cannot be read."""
    try:
        with damage_of("the other documents", remedy=OLDER_BACKUP):
            async for owned in records_beside(store).scan(tenant=tenant):
                yield owned
    except SnapshotCorrupt as error:
        yield TransferResult(SessionKey(tenant or ALL, "documents"), "failed", error, what="document")


async def _states(states: StateStore, tenant: str | None) -> AsyncGenerator[StateCopy | TransferResult]:
    """Each named state, or a result for one that cannot be read, or for all."""
    try:
        with damage_of("the list of named states", remedy=OLDER_BACKUP):
            heads = await all_states(states, tenant=tenant)
    except SnapshotCorrupt as error:
        yield TransferResult(SessionKey(tenant or ALL, "states"), "failed", error, what="state")
        return
    for head in heads:
        name = _name_of_state(head)
        try:
            with damage_of(f"the state {head.reference!r}", remedy=OLDER_BACKUP):
                copy = await read_state(states, head)
        except NotFound:
            yield TransferResult(name, "gone", what="state")
        except SnapshotCorrupt as error:
            yield TransferResult(name, "failed", error, what="state")
        else:
            yield copy


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file beside `path`, for its owner only, that takes its place when all went well; until then nothing is seen."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException as error:
            os.unlink(file.name)
            if isinstance(error, OSError) and error.filename is None:  # of a write, such as one that finds no room
                error.filename = str(path)
            raise
    _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    """Without it a power cut could take back the renaming."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


async def restore(
    store: SessionStore, file: IO[bytes], *, tenant: str | None = None, is_overwriting: bool = False
) -> AsyncGenerator[TransferResult]:
    """Makes the sessions, documents and states of a backup, `tenant`'s only if given; each is checked before it is
    written. A state that is refused fails alone.

    Raises ArchiveDamaged where the file's good part ends: sessions yielded before are in the store.
    """
    entries, records, states = read_archive(file), records_beside(store), states_beside(store)
    while (entry := await asyncio.to_thread(next, entries, None)) is not None:
        content, name = entry.content, _name_of(entry.content)
        if tenant not in (None, name.tenant):
            continue
        if isinstance(content, StateCopy):
            result = await _restored_state(states, content, is_overwriting=is_overwriting)
        elif isinstance(content, SessionCopy):
            result = TransferResult(name, await restore_session(store, content, is_overwriting=is_overwriting))
        else:
            outcome = await restore_document(records, content, is_overwriting=is_overwriting)
            result = TransferResult(name, outcome, what="document")
        yield dataclasses.replace(result, num_bytes_read=entry.num_bytes_read)


async def _restored_state(states: StateStore, copy: StateCopy, *, is_overwriting: bool) -> TransferResult:
    name = _name_of(copy)
    try:
        outcome = await restore_state(states, copy, is_overwriting=is_overwriting)
    except (SnapshotCorrupt, VersionConflict) as error:
        return TransferResult(name, "failed", error, what="state")
    return TransferResult(name, outcome, what="state")


def _name_of(content: Content) -> SessionKey:
    if isinstance(content, SessionCopy):
        return content.head.key
    if isinstance(content, StateCopy):
        return _name_of_state(content.stored.head)
    return SessionKey(content.tenant, f"{content.kind} {content.record_id}")


def _name_of_state(head: NamedState) -> SessionKey:
    return SessionKey(head.tenant, f"state {head.reference}")


async def copy_sessions(
    source: SessionStore,
    target: SessionStore,
    names: Sequence[SessionKey],
    *,
    tenant: str | None = None,
    is_overwriting: bool = False,
) -> AsyncGenerator[TransferResult]:
    """Makes the sessions in `target`, each as of its newest commit, the documents and the named states, `tenant`'s only
    if given; `source` stays as it is.

    What cannot be read fails alone, as in `backup`. Raises StoreUnavailable or StorageFull; sessions yielded before
    stay.
    """
    for name in names:
        try:
            copy = await _read_session(source, name)
            yield TransferResult(name, await restore_session(target, copy, is_overwriting=is_overwriting))
        except NotFound:
            yield TransferResult(name, "gone")
        except (SnapshotCorrupt, SessionBusy) as error:
            yield TransferResult(name, "failed", error)
    records = records_beside(target)
    async for owned in _documents(source, tenant):
        if isinstance(owned, OwnedRecord):
            outcome = await restore_document(records, owned, is_overwriting=is_overwriting)
            yield TransferResult(_name_of(owned), outcome, what="document")
        else:
            yield owned
    states = states_beside(target)
    async for state in _states(states_beside(source), tenant):
        if isinstance(state, StateCopy):
            yield await _restored_state(states, state, is_overwriting=is_overwriting)
        else:
            yield state


async def restore_document(records: RecordStore, owned: OwnedRecord, *, is_overwriting: bool) -> Outcome:
    """Makes the document under its own name. One that is equal is left alone."""
    key: dict[str, Any] = {"tenant": owned.tenant, "kind": owned.kind, "record_id": owned.record_id}
    old = await records.get(**key)
    if old is not None and (old.document == owned.document or not is_overwriting):
        return "same" if old.document == owned.document else "exists"
    await records.put(**key, document=owned.document, expected_version=ABSENT if old is None else old.version)
    return "written" if old is None else "replaced"


async def restore_session(store: SessionStore, copy: SessionCopy, *, is_overwriting: bool) -> Outcome:
    """Makes the session in `store` under its own name, and reads it back.

    One that is equal is left alone, so doing it again changes nothing. Its TTL begins anew. Raises SnapshotCorrupt when
    the stored session differs from the one written, and the errors of `SessionStore.create`.
    """
    key = copy.head.key
    try:
        old: SessionCopy | None = await read_copy(store, key)
    except NotFound:
        await _create(store, copy)
        return "written"
    except SnapshotCorrupt:
        old = None
    if old is not None and await asyncio.to_thread(_is_equal, old, copy):
        return "same"
    if not is_overwriting:
        return "exists"
    await store.delete(key)
    try:
        await _create(store, copy)
    except NsmError:
        if old is not None:
            with contextlib.suppress(NsmError):  # the first error tells more
                await _create(store, old)
        raise
    return "replaced"


async def _create(store: SessionStore, copy: SessionCopy) -> None:
    head = copy.head
    await create_copy(
        store,
        copy,
        head.key,
        metadata=head.metadata,
        ttl_s=head.ttl_s,
        forked_from=head.forked_from,
    )
    found = await read_copy(store, head.key)
    if not await asyncio.to_thread(_is_equal, found, copy):
        raise SnapshotCorrupt(f"session {head.session_id!r} was read back as something else than was written")


def _is_equal(one: SessionCopy, other: SessionCopy) -> bool:
    """In all that makes up a session, less the store's own times and whether the state is packed.

    Raises SnapshotCorrupt for states that differ and cannot be read.
    """
    names = ("version", "position", "model_fingerprint", "ttl_s", "forked_from")
    heads = [(*(getattr(copy.head, name) for name in names), dict(copy.head.metadata)) for copy in (one, other)]
    logs = [(copy.log_ids, copy.marks) for copy in (one, other)]
    return heads[0] == heads[1] and logs[0] == logs[1] and _has_equal_state(one.snapshot, other.snapshot)


def _has_equal_state(one: bytes | None, other: bytes | None) -> bool:
    """A state is the same packed and unpacked."""
    if one is None or other is None:
        return one is other
    return one == other or Snapshot.decode(one) == Snapshot.decode(other)
