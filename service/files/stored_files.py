"""Files of a tenant: bytes under an id, in pieces that every record store takes.

The file's own document comes first and names the number of pieces, so that an upload that was cut off is listed as
`uploaded`, counts in the quota and can be deleted.
"""

from __future__ import annotations

import base64
import dataclasses
import time
import uuid
from collections.abc import Sequence
from typing import Any

from nsm_core.errors import InvalidRequest, NotFound
from service.files.index import add_id, ids_of, remove_id
from service.messages import quoted
from service.stores.records.base import ABSENT, Kind, RecordStore
from service.tenants.tenants import Tenants

INDEX = "files"
PIECE_BYTES = 256 * 1024
PIECES_AT_ONCE = 8  # that are read in one trip
PURPOSES = ("batch", "fine-tune", "user_data", "evals", "assistants")
OUTPUT_PURPOSE = "batch_output"  # of what a batch has written


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file without its bytes. `created_at`, `expires_at`: unix seconds; None: kept for ever.

    `is_whole`: all of its pieces are stored.
    """

    id: str
    filename: str
    purpose: str
    created_at: int
    num_bytes: int
    num_pieces: int
    expires_at: int | None = None
    is_whole: bool = False

    def to_object(self) -> dict[str, Any]:
        """As the API shows it."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed" if self.is_whole else "uploaded",
            "status_details": None,
        }


def new_file_id() -> str:
    return f"file-{uuid.uuid4().hex}"


def file_not_found(file_id: str, *, param: str = "file_id") -> NotFound:
    """The same answer for an id that never was, is deleted, or is another tenant's."""
    return NotFound(f"file {quoted(file_id)} does not exist", param=param, code="file_not_found")


class Files:
    """Of one application, or of a command, which has no `tenants` and knows no limits."""

    def __init__(self, records: RecordStore, tenants: Tenants | None = None) -> None:
        self._records = records
        self._tenants = tenants

    async def create(
        self,
        tenant: str,
        raw: bytes,
        *,
        filename: str,
        purpose: str,
        ttl_s: int | None = None,
    ) -> StoredFile:
        """Durable when it returns. Raises QuotaExceeded, or InvalidRequest when the tenant has too many files."""
        if self._tenants is not None:
            await self._tenants.check_stored_bytes(tenant, num_new_bytes=len(raw))
        return await self._write(tenant, raw, file_id=new_file_id(), filename=filename, purpose=purpose, ttl_s=ttl_s)

    async def write_owed(
        self, tenant: str, raw: bytes, *, file_id: str, filename: str, ttl_s: int | None
    ) -> StoredFile:  # fmt: skip
        """What a batch has written, under an id that it knows beforehand: beyond every limit, since the work is done.
        A file that is there as a whole stays as it is.
        """
        found = await self._records.get(tenant=tenant, kind="file", record_id=file_id)
        if found is not None and (file := StoredFile(**found.document)).is_whole:
            return file
        return await self._write(
            tenant, raw, file_id=file_id, filename=filename, purpose=OUTPUT_PURPOSE, ttl_s=ttl_s, is_owed=True
        )

    async def _write(
        self,
        tenant: str,
        raw: bytes,
        *,
        file_id: str,
        filename: str,
        purpose: str,
        ttl_s: int | None,
        is_owed: bool = False,
    ) -> StoredFile:
        pieces = [raw[start : start + PIECE_BYTES] for start in range(0, len(raw), PIECE_BYTES)]
        now = int(time.time())
        file = StoredFile(
            id=file_id,
            filename=filename,
            purpose=purpose,
            created_at=now,
            num_bytes=len(raw),
            num_pieces=len(pieces),
            expires_at=None if ttl_s is None else now + ttl_s,
        )
        await self._put(tenant, "file", file.id, dataclasses.asdict(file), ttl_s)
        await add_id(self._records, tenant, INDEX, file.id, is_bounded=not is_owed)
        for number, piece in enumerate(pieces):
            await self._put(tenant, "part", f"{file.id}.{number}", _encode(piece), ttl_s)
        whole = dataclasses.replace(file, is_whole=True)
        await self._put(tenant, "file", file.id, dataclasses.asdict(whole), ttl_s)
        return whole

    async def _put(self, tenant: str, kind: Kind, record_id: str, document: dict[str, Any], ttl_s: int | None) -> None:
        found = await self._records.get(tenant=tenant, kind=kind, record_id=record_id)
        await self._records.put(
            tenant=tenant,
            kind=kind,
            record_id=record_id,
            document=document,
            expected_version=ABSENT if found is None else found.version,
            ttl_s=ttl_s,
        )

    async def get(self, tenant: str, file_id: str, *, param: str = "file_id") -> StoredFile:
        """Raises NotFound."""
        found = await self._records.get(tenant=tenant, kind="file", record_id=file_id)
        if found is None:
            raise file_not_found(file_id, param=param)
        return StoredFile(**found.document)

    async def read(self, tenant: str, file: StoredFile, *, param: str = "file_id") -> bytes:
        """All bytes. Raises NotFound for a file that was deleted meanwhile, InvalidRequest for half an upload."""
        if not file.is_whole:
            raise InvalidRequest(f"the upload of file {file.id!r} was cut off: send it again", param=param)
        names = [f"{file.id}.{number}" for number in range(file.num_pieces)]
        pieces: list[bytes] = []
        for start in range(0, len(names), PIECES_AT_ONCE):
            some = names[start : start + PIECES_AT_ONCE]
            for found in await self._records.get_many(tenant=tenant, kind="part", record_ids=some):
                if found is None:
                    raise file_not_found(file.id, param=param)
                pieces.append(_decode(dict(found.document)))
        return b"".join(pieces)

    async def list(self, tenant: str) -> Sequence[StoredFile]:
        """All of a tenant's, the oldest first; those that have expired are not among them."""
        ids = await ids_of(self._records, tenant, INDEX)
        found = await self._records.get_many(tenant=tenant, kind="file", record_ids=ids)
        gone = [name for name, one in zip(ids, found, strict=True) if one is None]
        for name in gone:
            await remove_id(self._records, tenant, INDEX, name)
        return [StoredFile(**one.document) for one in found if one is not None]

    async def delete(self, tenant: str, file_id: str) -> None:
        """Raises NotFound."""
        file = await self.get(tenant, file_id)
        for number in range(file.num_pieces):
            await self._records.delete(tenant=tenant, kind="part", record_id=f"{file_id}.{number}")
        await self._records.delete(tenant=tenant, kind="file", record_id=file_id)
        await remove_id(self._records, tenant, INDEX, file_id)


def _encode(piece: bytes) -> dict[str, str]:
    """Most files are plain text, which takes a byte for each; others take a third more."""
    return {"text": piece.decode()} if piece.isascii() else {"base64": base64.b64encode(piece).decode()}


def _decode(document: dict[str, str]) -> bytes:
    return document["text"].encode() if "text" in document else base64.b64decode(document["base64"])
