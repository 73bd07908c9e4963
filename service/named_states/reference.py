"""What the field `state` of a request names: a state by its name, or the state itself."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import re

from nsm_core.errors import InvalidRequest, NotFound
from service.messages import quoted

NAME = r"[A-Za-z0-9_-]{1,64}"
REFERENCE = re.compile(rf"({NAME})(?:@([1-9][0-9]{{0,17}}))?")
MIN_DATA_CHARS = 100  # no reference is so long, and no state so short


@dataclasses.dataclass(frozen=True, slots=True)
class Reference:
    """`version`: None for the newest."""

    name: str
    version: int | None

    def __str__(self) -> str:
        return self.name if self.version is None else f"{self.name}@{self.version}"


def parse_reference(value: str, *, param: str = "state") -> Reference:
    """Raises InvalidRequest."""
    found = REFERENCE.fullmatch(value)
    if found is None:
        message = f"{param} must be a name (1 to 64 of A-Z a-z 0-9 _ and -), or name@version, got {quoted(value[:80])}"
        raise InvalidRequest(message, param=param)
    name, version = found.groups()
    return Reference(name, None if version is None else int(version))


def parse_state(value: str) -> Reference | bytes:
    """A reference, or the bytes of a state in base64. Raises InvalidRequest."""
    if len(value) < MIN_DATA_CHARS:
        return parse_reference(value)
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        message = f"state must be a name, name@version, or a state in base64; {len(value)} characters are no base64"
        raise InvalidRequest(message, param="state") from None


def state_not_found(reference: Reference, *, param: str | None = "state") -> NotFound:
    return NotFound(f"state {str(reference)!r} does not exist", param=param, code="state_not_found")
