"""A form as browsers and clients send files (multipart/form-data), out of a body that was read whole."""

from __future__ import annotations

import dataclasses
from email.message import Message

from starlette.exceptions import HTTPException

from nsm_core.errors import InvalidRequest

MAX_PARTS = 16
MAX_HEADER_BYTES = 4096


@dataclasses.dataclass(frozen=True, slots=True)
class FormPart:
    """One field. `filename`: None for a plain value."""

    raw: bytes
    filename: str | None

    @property
    def text(self) -> str:
        """Raises InvalidRequest for bytes that are no UTF-8."""
        try:
            return self.raw.decode()
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"a field of the form is not UTF-8: {error.reason} at byte {error.start}") from error


def read_form(content_type: str, body: bytes) -> dict[str, FormPart]:
    """The fields by their names. Raises HTTPException 415 for another type, InvalidRequest for a form that is none."""
    header = Message()
    header["content-type"] = content_type or "none/none"
    boundary = header.get_boundary()
    if header.get_content_type() != "multipart/form-data":
        raise HTTPException(415, f"the Content-Type must be multipart/form-data, got {content_type[:100] or 'none'}")
    if not boundary:
        raise InvalidRequest("the body must be a form: its Content-Type names no boundary")
    before, *pieces = (b"\r\n" + body).split(b"\r\n--" + boundary.encode())
    if before.strip() or len(pieces) < 2 or not pieces[-1].startswith(b"--"):
        raise InvalidRequest("the body must be a form: it does not begin and end with its boundary")
    if len(pieces) - 1 > MAX_PARTS:
        raise InvalidRequest(f"the body must have at most {MAX_PARTS} fields, got {len(pieces) - 1}")
    fields: dict[str, FormPart] = {}
    for piece in pieces[:-1]:
        name, part = _read_part(piece)
        if name in fields:
            raise InvalidRequest(f"{name} must be given once in the form", param=name)
        fields[name] = part
    return fields


def _read_part(piece: bytes) -> tuple[str, FormPart]:
    head, gap, raw = piece.partition(b"\r\n\r\n")
    disposition = Message()
    for line in head[:MAX_HEADER_BYTES].decode("utf-8", "replace").split("\r\n"):
        key, _, value = line.partition(":")
        if key.strip().lower() == "content-disposition":
            disposition["content-disposition"] = value.strip()
    name = disposition.get_param("name", header="content-disposition")
    filename = disposition.get_param("filename", header="content-disposition")
    if not gap or not isinstance(name, str):
        raise InvalidRequest("the body must be a form: a part of it has no name")
    return name, FormPart(raw, filename if isinstance(filename, str) else None)
