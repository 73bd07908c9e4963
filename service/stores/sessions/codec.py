"""Shared by the session stores: expiry, the cursor of a listing, the bytes of the token log, checked snapshots."""

from __future__ import annotations

import base64
import binascii
import contextlib
import struct
import zlib
from collections.abc import Iterator
from types import MappingProxyType

from nsm_core.errors import InvalidRequest, SnapshotCorrupt
from nsm_core.state.snapshot import verify
from service.messages import quoted
from service.stores.sessions.base import SessionHead, StoredSession
from service.stores.sessions.transitions import TOKEN_BYTES as TOKEN_BYTES
from service.stores.sessions.transitions import LogTail, NewSession


def new_head(new: NewSession, now: float) -> SessionHead:
    """The head of a session that is made at `now`."""
    mark = new.newest_mark
    return SessionHead(
        tenant=new.key.tenant,
        session_id=new.key.session_id,
        version=new.version,
        position=new.position,
        created_at=now,
        updated_at=now,
        model_fingerprint=new.model_fingerprint,
        metadata=MappingProxyType(dict(new.metadata)),
        num_log_tokens=len(new.log_ids),
        snapshot_bytes=len(new.snapshot or b""),
        ttl_s=new.ttl_s,
        expires_at=expiry(now, new.ttl_s),
        forked_from=new.forked_from,
        snapshot_version=mark.version,
        snapshot_position=mark.position,
        tokenizer_fingerprint=new.tokenizer_fingerprint,
        numerics=new.numerics,
        energy_joules=new.energy_joules,
    )


def expiry(now: float, ttl_s: float | None) -> float | None:
    """When a session that was committed or updated at `now` expires; None: never."""
    return None if ttl_s is None else now + ttl_s


def checked(head: SessionHead, raw: bytes | None, tail: LogTail) -> StoredSession:
    """The answer of `acquire`: damage is reported, not raised."""
    if raw is None:
        return StoredSession(head=head, snapshot=None, damage="missing" if head.snapshot_version else None, tail=tail)
    try:
        verify(raw)
    except SnapshotCorrupt:
        return StoredSession(head=head, snapshot=None, damage="corrupt", tail=tail)
    return StoredSession(head=head, snapshot=raw, tail=tail)


def sound(raw: bytes | None) -> bytes | None:
    """The answer of `load_retained`: `raw`, or None where it is damaged."""
    if raw is not None:
        try:
            verify(raw)
        except SnapshotCorrupt:
            return None
    return raw


# Of the decoding of stored bytes: bytes that nobody wrote so are damage, and no fault of the code
DAMAGE = (ValueError, TypeError, LookupError, AttributeError, struct.error, zlib.error)


@contextlib.contextmanager
def decoding(what: str, *, error: type[SnapshotCorrupt] = SnapshotCorrupt) -> Iterator[None]:
    """Around the decoding of stored bytes."""
    try:
        yield
    except DAMAGE as cause:
        raise error(f"{what} is damaged") from cause


@contextlib.contextmanager
def naming(session_id: str) -> Iterator[None]:
    """Adds the session's id to damage found inside, so that an operator can find it."""
    try:
        yield
    except SnapshotCorrupt as error:
        raise type(error)(f"session {session_id!r}: {error}") from error


def require_sound(head: SessionHead, raw: bytes | None, tail: LogTail) -> StoredSession:
    """The answer of `load`; raises SnapshotCorrupt."""
    if raw is not None:
        with naming(head.session_id):
            verify(raw)
    elif head.snapshot_version:
        raise SnapshotCorrupt(f"session {head.session_id!r} has no snapshot of its version {head.snapshot_version}")
    return StoredSession(head=head, snapshot=raw, tail=tail)


def encode_cursor(head: SessionHead) -> str:
    """The position after `head` in a listing: its sort key, which stays valid when `head` is deleted."""
    sort_key = f"{head.created_at.hex()} {head.session_id}"
    return base64.urlsafe_b64encode(sort_key.encode()).decode().rstrip("=")


def decode_cursor(cursor: str) -> tuple[float, str]:
    """(created_at, session_id); raises InvalidRequest for text that is no cursor."""
    try:
        padded = cursor.encode("ascii") + b"=" * (-len(cursor) % 4)
        created_at, session_id = base64.b64decode(padded, altchars=b"-_", validate=True).decode().split(" ")
        return float.fromhex(created_at), session_id
    except (ValueError, OverflowError, binascii.Error) as error:
        raise InvalidRequest(
            f"after must be a next_cursor of an earlier page, got {quoted(cursor)}", param="after"
        ) from error


def encode_ids(ids: tuple[int, ...]) -> bytes:
    """Token ids as the log keeps them: 4 bytes each, little endian."""
    return struct.pack(f"<{len(ids)}I", *ids)


def decode_ids(raw: bytes) -> tuple[int, ...]:
    """The inverse of `encode_ids`; raises SnapshotCorrupt when the length does not fit."""
    if len(raw) % TOKEN_BYTES:
        raise SnapshotCorrupt(f"the token log has {len(raw)} bytes, not a multiple of {TOKEN_BYTES}")
    return struct.unpack(f"<{len(raw) // TOKEN_BYTES}I", raw)
