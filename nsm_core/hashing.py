"""The project's two hashes: `identity` names a value for ever, `checksum` finds damage. No torch here."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Protocol, Self

import xxhash

CHECKSUM_BYTES = 16


class Hash(Protocol):
    """A hash that is fed piece by piece. Borders of pieces do not count: hash lengths where they matter."""

    def update(self, data: bytes | memoryview, /) -> None: ...

    def digest(self) -> bytes: ...

    def hexdigest(self) -> str: ...

    def copy(self) -> Self: ...


def new_identity(*parts: str) -> Hash:
    """A SHA-256 that begins with `parts`, each after its length: ("a", "bc") and ("ab", "c") differ."""
    running = hashlib.sha256()
    for part in parts:
        raw = part.encode()
        running.update(len(raw).to_bytes(8, "little") + raw)
    return running


def identity(data: bytes | memoryview) -> str:
    """SHA-256 of `data`, 64 hexadecimal digits. Nobody can make two values of one identity: it may name a value."""
    return hashlib.sha256(data).hexdigest()


def identity_of(*parts: str, num_bytes: int = 16) -> str:
    """The first `num_bytes` of the identity of a tuple of texts, in hexadecimal digits."""
    return new_identity(*parts).hexdigest()[: 2 * num_bytes]


def file_identity(path: Path) -> str:
    """`identity` of a file's bytes. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checksum(*parts: bytes | memoryview) -> bytes:
    """XXH3-128 of `parts` in a row, CHECKSUM_BYTES long. Finds damage by accident, at memory speed.

    It has no key: whoever can write to a store could make a checksum anew, whatever the function.
    """
    running = new_checksum()
    for part in parts:
        running.update(part)
    return running.digest()


def new_checksum() -> Hash:
    """A `checksum` that is fed piece by piece."""
    return xxhash.xxh3_128()
