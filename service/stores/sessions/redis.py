"""Sessions in Redis or Valkey: one server, one watched by Sentinels, or a cluster. Any number of gateways share them.

A session is seven kinds of keys under one hash tag (benchmarks/notes/redis.md). Each transition is one Lua script, and
its clock is the server's. Megabytes stay out of Lua: a snapshot is first written with a plain SET under a short expiry,
and the script that moves the head renames it into its place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from redis.exceptions import TryAgainError

from nsm_core.errors import InvalidRequest, NotFound, SnapshotCorrupt
from service.messages import quoted
from service.stores.redis.checks import check_server, least_room, require_room, warn_of_losses
from service.stores.redis.client import COMMIT_PATIENCE_S, PATIENCE_S, Attempt, RedisClient
from service.stores.redis.keys import Keyspace
from service.stores.redis.scripts import (
    ACQUIRE,
    COMMIT,
    CREATE,
    DELETE,
    LOAD,
    PUT_SNAPSHOT,
    RELEASE,
    RENEW,
    REWIND,
    UPDATE,
    Script,
)
from service.stores.redis.url import RedisAddress
from service.stores.sessions.base import (
    UNSET,
    Commit,
    KnownVersion,
    LateSnapshot,
    Lease,
    LeasedSession,
    LogMark,
    LogTail,
    NewSession,
    Rewind,
    SessionHead,
    SessionPage,
    StoredSession,
    StoreRoom,
    TenantUsage,
    Unset,
)
from service.stores.sessions.codec import (
    TOKEN_BYTES,
    checked,
    decode_cursor,
    decode_ids,
    encode_cursor,
    encode_ids,
    require_sound,
    sound,
)
from service.stores.sessions.errors import (
    already_exists,
    lease_lost,
    log_corrupt,
    not_found,
    require_version,
    session_busy,
    session_expired,
)
from service.stores.sessions.key import SessionKey
from service.stores.sessions.redis_fields import (
    MICROSECONDS,
    StoredHead,
    checksum_field,
    decode_chunk,
    decode_head,
    decode_mark,
    decode_tail,
    encode_mark,
    encode_metadata,
    lease_fields,
    lease_of,
    optional_us,
    origin_fields,
    retention_field,
    to_us,
)
from service.stores.sessions.redis_index import IndexEntry, TenantIndex
from service.stores.sessions.redis_shedding import RedisShedding
from service.stores.sessions.redis_turns import RedisTurns, begun_or_found, require_begun, start_fields
from service.stores.sessions.retention import RetainedSnapshot
from service.stores.sessions.turn_records import TurnStart

Result = TypeVar("Result")

STAGED_S = 60  # a snapshot whose head never came to it vanishes by itself
CONSISTENT_READS = 5  # tries to read two keys between two commits


class RedisSessionStore:
    """The shared SessionStore."""

    def __init__(self, address: RedisAddress) -> None:
        self.keys = Keyspace(address.prefix)
        self.client = RedisClient(address)
        self.snapshot_writes = 1.0  # the append-only file
        self.max_uncounted_request = 0
        self._largest_bytes = 0  # of the snapshots that were to be written here
        self._index = TenantIndex(self.client, self.keys)
        self.shed_snapshots = RedisShedding(self.client, self.keys, self._index.put_soon).shed_snapshots
        turns = RedisTurns(self.client, self.keys, self._index.put_soon)
        self.begin_turn, self.append_turn, self.end_turn = turns.begin_turn, turns.append_turn, turns.end_turn
        self.forget_turn, self.get_turn, self.cancel_turn = turns.forget_turn, turns.get_turn, turns.cancel_turn

    def num_connections_in_use(self) -> int:
        return self.client.num_in_use

    async def open(self) -> None:
        self.client.connect()
        try:
            warn_of_losses(await check_server(self.client, self.keys))
        except BaseException:
            await self.close()
            raise

    async def check(self) -> None:
        """Raises what `open` would raise; nothing is open afterwards."""
        self.client.connect()
        try:
            await check_server(self.client, self.keys)
        finally:
            await self.close()

    async def close(self) -> None:
        await self._index.close()
        await self.client.close()

    async def create(self, new: NewSession) -> SessionHead:
        created_us = await self._index.reserve(new.key)
        nonce = _nonce()
        first = (*new.key, nonce, created_us, new.model_fingerprint, encode_metadata(new.metadata))
        second = (optional_us(new.ttl_s), new.forked_from or "", new.version, new.position)
        third = (*origin_fields(new), *dataclasses.astuple(new.newest_mark), *_snapshot_fields(new.snapshot))
        log = (encode_ids(new.log_ids), "\n".join(map(encode_mark, new.marks)))
        args = (*first, *second, *third, *log)
        status, answer = await self._transition(CREATE, new.key, args, nonce=nonce, snapshot=new.snapshot)
        stored = _require_head(answer, new.key)
        await self._index.put(stored)
        if status == "exists":
            raise already_exists(new.key.session_id)
        return stored.head

    async def update(
        self,
        key: SessionKey,
        *,
        metadata: Mapping[str, str] | None = None,
        ttl_s: float | Unset | None = UNSET,
    ) -> SessionHead:
        new_metadata = (0, "") if metadata is None else (1, encode_metadata(metadata))
        new_ttl = (0, "") if isinstance(ttl_s, Unset) else (1, optional_us(ttl_s))
        async with self._knowing_expiry(key):
            _, answer = await self._transition(UPDATE, key, (*new_metadata, *new_ttl))
        stored = _require_head(answer, key)
        await self._index.put(stored)
        return stored.head

    async def get(self, key: SessionKey) -> SessionHead:
        async with self._knowing_expiry(key):
            answer = await self.client.command("HGETALL", self.keys.session(key).head)
            return _require_head(answer, key).head

    async def load(self, key: SessionKey) -> StoredSession:
        async with self._knowing_expiry(key):
            stored, tail, raw = await self.client.call(lambda attempt: self._read(attempt, key))
        if raw is not None and checksum_field(raw) != stored.snapshot_checksum:
            raise SnapshotCorrupt(f"the snapshot of session {key.session_id!r} is not the one that was stored")
        return require_sound(stored.head, raw, tail)

    async def _read(self, attempt: Attempt, key: SessionKey) -> tuple[StoredHead, LogTail, bytes | None]:
        """Head, tail and snapshot, which may be damaged. Raises NotFound or LogCorrupt."""
        keys = self.keys.session(key)

        async def read() -> tuple[StoredHead, LogTail, bytes | None]:
            answer, raw = await attempt.script_and_get(LOAD, keys.all(""), key=keys.snapshot)
            return (*_read_tail(answer, key), raw)

        return await _consistent(read, lambda result: checksum_field(result[2]) == result[0].snapshot_checksum)

    async def acquire(
        self,
        key: SessionKey,
        *,
        holder: str,
        lease_s: float,
        known: KnownVersion | None = None,
        start: TurnStart | None = None,
        max_records: int = 1,
    ) -> LeasedSession:
        keys, nonce = self.keys.session(key), _nonce()
        known_field = "" if known is None else f"{to_us(known.created_at)}:{known.version}"
        turn_fields = () if start is None else start_fields(start, max_records, ends_abandoned=False)
        values = (holder, nonce, to_us(lease_s), known_field, *turn_fields)

        async def work(attempt: Attempt) -> tuple[Any, bytes | None]:
            if known is not None:
                return await attempt.script(ACQUIRE, keys.all(nonce), *values), None
            return await attempt.script_and_get(ACQUIRE, keys.all(nonce), *values, key=keys.snapshot)

        async with self._knowing_expiry(key):
            answer, raw = await self.client.call(work)
            if answer[0] == b"busy":
                raise session_busy(key.session_id, int(answer[1]) / MICROSECONDS)
            if start is not None and answer[0] in (b"conflict", b"other_model"):
                require_begun(answer[0], start, _require_head(answer[1], key).head)
            stored, tail = _read_tail(answer, key)
        lease, retained = lease_of(stored, holder), tuple(slot.snapshot for slot in stored.retained)
        record = None if start is None else begun_or_found(answer[4], start, stored.head)
        if record is not None:
            self._index.put_soon(stored)
        if known == (stored.head.created_at, stored.head.version):
            session = StoredSession(head=stored.head, snapshot=None)
            return LeasedSession(lease=lease, stored=session, retained=retained, is_known=True, record=record)
        if checksum_field(raw) != stored.snapshot_checksum:
            # not read yet, replaced in between the script and the reading, or damaged
            stored, tail, raw = await self.client.call(lambda attempt: self._read(attempt, key))
        session = checked(stored.head, raw, tail)
        if session.snapshot is not None and checksum_field(raw) != stored.snapshot_checksum:
            session = StoredSession(head=stored.head, snapshot=None, damage="corrupt", tail=tail)
        return LeasedSession(lease=lease, stored=session, retained=retained, record=record)

    async def renew(self, lease: Lease, *, lease_s: float) -> Lease:
        status, answer = await self._transition(RENEW, lease.key, (*lease_fields(lease), to_us(lease_s)))
        if status == "lease_lost":
            raise lease_lost(lease)
        return lease_of(_require_head(answer, lease.key), lease.holder)

    async def release(self, lease: Lease) -> None:
        await self._transition(RELEASE, lease.key, lease_fields(lease))

    async def commit(self, lease: Lease, commit: Commit) -> SessionHead:
        turn = commit.turn
        record = ("", "", 0) if turn is None else (turn.turn_id, turn.result, to_us(turn.ttl_s))
        args = (
            *_change_fields(commit),
            encode_ids(commit.new_ids),
            *record,
            retention_field(commit.retention),
            commit.replica,
            *(("", "") if commit.after is None else (commit.after.version, commit.after.num_log_tokens)),
            "" if commit.num_before_border is None else TOKEN_BYTES * commit.num_before_border,
            commit.newest_mark.version,
            commit.newest_mark.position,
        )
        return await self._move(COMMIT, lease, commit, args)

    async def put_snapshot(self, key: SessionKey, late: LateSnapshot) -> SessionHead | None:
        nonce = _nonce()
        mark = (to_us(late.created_at), late.version, late.position)
        args = (*mark, *_snapshot_fields(late.snapshot), retention_field(late.retention))
        status, answer = await self._transition(PUT_SNAPSHOT, key, args, nonce=nonce, snapshot=late.snapshot)
        if status == "refused":
            return None
        stored = _require_head(answer, key)
        await self._index.put(stored)
        return stored.head

    async def rewind(self, lease: Lease, rewind: Rewind) -> SessionHead:
        return await self._move(REWIND, lease, rewind, (*_change_fields(rewind), rewind.num_log_tokens))

    async def _move(
        self, script: Script, lease: Lease, change: Commit | Rewind, values: tuple[object, ...]
    ) -> SessionHead:
        nonce = _nonce()
        mark = (change.num_sampled, "" if change.seed is None else change.seed)
        args = (*lease_fields(lease), change.expected_version, nonce, *mark, *values)
        status, answer = await self._transition(
            script,
            lease.key,
            args,
            nonce=nonce,
            snapshot=change.snapshot,
            patience_s=COMMIT_PATIENCE_S,
        )
        stored = _require_head(answer, lease.key)
        head = stored.head
        if status == "lease_lost":
            raise lease_lost(lease)
        if status == "conflict":
            require_version(head, change.expected_version)
        if status == "log_corrupt":
            raise log_corrupt(head, "it does not have the end that a turn went on from")
        if status == "too_long":
            raise InvalidRequest(f"the log of session {lease.session_id!r} has {head.num_log_tokens} tokens")
        if head.ttl_s is None:
            self._index.put_soon(stored)
        else:  # the index has the expiry too
            await self._index.put(stored)
        return head

    async def read_log(self, key: SessionKey, *, stop: int | None = None) -> tuple[int, ...]:
        keys = self.keys.session(key)

        async def read(attempt: Attempt) -> tuple[SessionHead, tuple[int, ...]]:
            answer, chunks = await attempt.together(("HGETALL", keys.head), ("LRANGE", keys.log, 0, -1))
            raw = b"".join(decode_chunk(chunk, session_id=key.session_id) for chunk in chunks)
            return _require_head(answer, key).head, decode_ids(raw)

        async with self._knowing_expiry(key):
            head, ids = await self.client.call(
                lambda attempt: _consistent(
                    lambda: read(attempt), lambda result: len(result[1]) == result[0].num_log_tokens
                )
            )
        if len(ids) != head.num_log_tokens:
            raise log_corrupt(head, f"it has {len(ids)} tokens of {head.num_log_tokens}")
        return ids[:stop]

    async def log_marks(self, key: SessionKey) -> tuple[LogMark, ...]:
        keys = self.keys.session(key)

        async def read(attempt: Attempt) -> tuple[LogMark, ...]:
            answer, marks = await attempt.together(("HGETALL", keys.head), ("LRANGE", keys.marks, 0, -1))
            _require_head(answer, key)
            return tuple(map(decode_mark, marks))

        async with self._knowing_expiry(key):
            return await self.client.call(read)

    async def list(self, *, tenant: str, limit: int, cursor: str | None = None) -> SessionPage:
        last = None if cursor is None else _entry_of(cursor)
        heads: list[SessionHead] = []
        while len(heads) <= limit:
            entries = await self._index.page(tenant, limit=limit + 1 - len(heads), after=last)
            if not entries:
                break
            heads += await self._living(tenant, entries)
            last = entries[-1]
        page = tuple(heads[:limit])
        return SessionPage(heads=page, next_cursor=encode_cursor(page[-1]) if len(heads) > limit else None)

    async def _living(self, tenant: str, entries: Sequence[IndexEntry]) -> Sequence[SessionHead]:
        """The heads of `entries`; outdated entries of the index are corrected."""
        reads = [("HGETALL", self.keys.session(SessionKey(tenant, entry.session_id)).head) for entry in entries]
        answers = await self.client.call(lambda attempt: attempt.together(*reads))
        heads = []
        for entry, answer in zip(entries, answers, strict=True):
            stored = decode_head(answer, SessionKey(tenant, entry.session_id))
            if stored is None:
                await self._index.drop_stale(tenant, entry)
            elif stored.head.created_at != entry.created_at:  # made again: it belongs to a page of newer ones
                await self._index.put(stored)
            else:
                heads.append(stored.head)
        return heads

    async def list_tenants(self) -> tuple[str, ...]:
        return await self._index.tenants()

    async def usage(self, *, tenant: str) -> TenantUsage:
        return await self._index.usage(tenant)

    async def list_retained(self, key: SessionKey) -> tuple[RetainedSnapshot, ...]:
        async with self._knowing_expiry(key):
            head = await self.client.call(lambda attempt: self._read_head(attempt, key))
        return tuple(slot.snapshot for slot in head.retained)

    async def load_retained(self, key: SessionKey, *, version: int) -> bytes | None:
        """Between the two reads a slot may be given to another snapshot: its header, which readers check, tells."""
        keys = self.keys.session(key)

        async def work(attempt: Attempt) -> Any:
            stored = await self._read_head(attempt, key)
            if version == stored.head.snapshot_version:
                return await attempt.command("GET", keys.snapshot)
            slots = [slot.slot for slot in stored.retained if slot.snapshot.version == version]
            return await attempt.command("GET", keys.retained[slots[0] - 1]) if slots else None

        async with self._knowing_expiry(key):
            return sound(await self.client.call(work))

    async def _read_head(self, attempt: Attempt, key: SessionKey) -> StoredHead:
        answer = await attempt.command("HGETALL", self.keys.session(key).head)
        head = decode_head(answer, key)
        if head is None:
            raise not_found(key.session_id)
        return head

    async def delete(self, key: SessionKey) -> None:
        keys = self.keys.session(key).all("")
        head = await self.get(key)

        async def work(attempt: Attempt) -> bool:
            (status,) = await attempt.script(DELETE, keys, to_us(head.created_at))
            # Not found at a later attempt: the first one deleted it, and its answer was lost.
            return status == b"ok" or attempt.number > 1

        if not await self.client.call(work):
            raise not_found(key.session_id)
        await self._index.forget(head)

    async def room(self) -> StoreRoom | None:
        return await least_room(self.client)

    @contextlib.asynccontextmanager
    async def _knowing_expiry(self, key: SessionKey) -> AsyncIterator[None]:
        """Around a call: a session that is not found may be known to have expired."""
        try:
            yield
        except NotFound:
            if await self._index.has_expired(key):
                raise session_expired(key.session_id) from None
            raise

    async def remove_expired(self) -> int:
        """Nothing to do: Redis drops a session's keys itself when its time has come."""
        return 0

    async def check_writable(self) -> None:
        await self.client.command("SET", self.keys.probe, secrets.token_hex(8))
        await require_room(self.client, 2 * self._largest_bytes)  # as received, and as stored

    async def _transition(
        self,
        script: Script,
        key: SessionKey,
        args: tuple[Any, ...],
        *,
        nonce: str = "",
        snapshot: bytes | None = None,
        patience_s: float = PATIENCE_S,
    ) -> tuple[str, Any]:
        """A script's status and the head as it left it. Raises NotFound."""
        keys = self.keys.session(key)
        self._largest_bytes = max(self._largest_bytes, len(snapshot or b""))

        async def work(attempt: Attempt) -> tuple[str, Any]:
            staged = f"{nonce}-{attempt.number}"  # what an earlier attempt sent may still come
            if snapshot is not None:
                await attempt.set_in_pieces(keys.staged(staged), snapshot, expire_s=STAGED_S)
            status, *answer = await attempt.script(script, keys.all(staged), *args)
            if status == b"unstaged":  # lost with a server that failed in between
                raise TryAgainError("the staged snapshot is gone")
            return status.decode(), answer[0] if answer else {}

        status, answer = await self.client.call(work, patience_s=patience_s)
        if status == "not_found":
            raise not_found(key.session_id)
        return status, answer


async def _consistent(read: Callable[[], Awaitable[Result]], is_consistent: Callable[[Result], bool]) -> Result:
    """Two keys read without a transaction may be of two versions: then they are read again."""
    result = await read()
    for _ in range(CONSISTENT_READS - 1):
        if is_consistent(result):
            break
        result = await read()
    return result


def _nonce() -> str:
    return secrets.token_hex(12)


def _change_fields(change: Commit | Rewind) -> tuple[object, ...]:
    """The arguments that a commit and a rewind have in common."""
    return change.position, change.model_fingerprint, *origin_fields(change), *_snapshot_fields(change.snapshot)


def _snapshot_fields(snapshot: bytes | None) -> tuple[int, str]:
    return len(snapshot or b""), checksum_field(snapshot)


def _read_tail(answer: Any, key: SessionKey) -> tuple[StoredHead, LogTail]:
    """The answer of the scripts that give the log after the snapshot. Raises NotFound or LogCorrupt."""
    status, *rest = answer
    stored = _require_head(rest[0] if rest else {}, key)
    if status == b"log_corrupt":
        raise log_corrupt(stored.head, rest[1].decode())
    return stored, decode_tail(rest[1], rest[2])


def _require_head(answer: Any, key: SessionKey) -> StoredHead:
    stored = decode_head(answer, key)
    if stored is None:
        raise not_found(key.session_id)
    return stored


def _entry_of(cursor: str) -> IndexEntry:
    created_at, session_id = decode_cursor(cursor)
    if not math.isfinite(created_at):
        raise InvalidRequest(f"after must be a next_cursor of an earlier page, got {quoted(cursor)}", param="after")
    return IndexEntry(session_id, created_at)
