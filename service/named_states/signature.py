"""The seal on a state that a client carries: proof that a server with the same key has written it.

offset  bytes  what
0       8      magic "NSMSIGN" and a zero byte
8       N      the file
8 + N   32     HMAC-SHA256 of the file under the key
"""

from __future__ import annotations

import hmac
from pathlib import Path

from nsm_core.errors import ConfigError, InvalidRequest

MAGIC = b"NSMSIGN\0"
MAC_BYTES = 32  # of SHA-256
MIN_KEY_BYTES = 32


class StateSeal:
    """`key`: None on a server that neither signs nor asks for signatures."""

    def __init__(self, key: bytes | None) -> None:
        self._key = key

    @classmethod
    def from_file(cls, path: Path | None) -> StateSeal:
        """Raises ConfigError for a file that cannot be read or is too short for a key."""
        if path is None:
            return cls(None)
        try:
            key = path.read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"cannot read the key of states {path}: {error.strerror}") from error
        if len(key) < MIN_KEY_BYTES:
            raise ConfigError(f"the key of states must have at least {MIN_KEY_BYTES} bytes, {path} has {len(key)}")
        return cls(key)

    def seal(self, file: bytes) -> bytes:
        """The file with its seal; as it is without a key."""
        return file if self._key is None else MAGIC + file + _mac(self._key, file)

    def open(self, raw: bytes, *, is_required: bool = True) -> bytes:
        """The file. Raises InvalidRequest for a seal that is not good, and, if one is required, where there is none.

        Nothing is required, and no seal is looked at, without a key.
        """
        is_sealed = raw.startswith(MAGIC) and len(raw) > len(MAGIC) + MAC_BYTES
        file = raw[len(MAGIC) : -MAC_BYTES] if is_sealed else raw
        if self._key is None:
            return file
        if not is_sealed and not is_required:
            return file
        if not is_sealed:
            raise InvalidRequest("state is not signed; this server takes signed states only", param="state")
        if not hmac.compare_digest(_mac(self._key, file), raw[-MAC_BYTES:]):
            raise InvalidRequest("state has a signature that was not made with this server's key", param="state")
        return file


def _mac(key: bytes, file: bytes) -> bytes:
    return hmac.digest(key, file, "sha256")
