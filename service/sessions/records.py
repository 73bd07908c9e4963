"""What the stores share: the errors they answer with, the cursor of a listing, the token log's bytes."""

from __future__ import annotations

import base64
import binascii
import struct

from nsm_core.errors import InvalidRequest, NotFound, SnapshotCorrupt, VersionConflict
from service.sessions.base import SessionHead

_TOKEN_BYTES = 4


def not_found(session_id: str) -> NotFound:
    """The same answer for an id that never was, is deleted, or is another tenant's."""
    return NotFound(f"session {session_id[:80]!r} does not exist", param="session_id", code="session_not_found")


def already_exists(session_id: str) -> VersionConflict:
    return VersionConflict(f"session {session_id!r} exists already")


def require_same_head(head: SessionHead, *, created_at: float, expected_version: int) -> None:
    """The compare of compare-and-set; raises VersionConflict."""
    if head.created_at != created_at:
        raise VersionConflict(f"session {head.session_id!r} was deleted and created again meanwhile")
    if head.version != expected_version:
        raise VersionConflict(
            f"session {head.session_id!r} is at version {head.version}, expected version {expected_version}"
        )


def encode_cursor(head: SessionHead) -> str:
    """The place after `head` in a listing: what it is sorted by, so that it stays good when `head` is deleted."""
    place = f"{head.created_at.hex()} {head.session_id}"
    return base64.urlsafe_b64encode(place.encode()).decode().rstrip("=")


def decode_cursor(cursor: str) -> tuple[float, str]:
    """(created_at, session_id); raises InvalidRequest for text that is no cursor."""
    try:
        padded = cursor.encode("ascii") + b"=" * (-len(cursor) % 4)
        created_at, session_id = base64.b64decode(padded, altchars=b"-_", validate=True).decode().split(" ")
        return float.fromhex(created_at), session_id
    except (ValueError, OverflowError, binascii.Error) as error:
        raise InvalidRequest(
            f"after must be a next_cursor of an earlier page, got {cursor!r}", param="after"
        ) from error


def encode_ids(ids: tuple[int, ...]) -> bytes:
    """Token ids as the log keeps them: 4 bytes each, little endian."""
    return struct.pack(f"<{len(ids)}I", *ids)


def decode_ids(raw: bytes) -> tuple[int, ...]:
    """The inverse of `encode_ids`; raises SnapshotCorrupt when the length does not fit."""
    if len(raw) % _TOKEN_BYTES:
        raise SnapshotCorrupt(f"the token log has {len(raw)} bytes, not a multiple of {_TOKEN_BYTES}")
    return struct.unpack(f"<{len(raw) // _TOKEN_BYTES}I", raw)
