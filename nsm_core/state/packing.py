"""A state's bytes in less room, without loss. No torch here.

Floats of a state have exponents that are much alike, and slots nobody wrote to hold the same few values: with the first
bytes of all words put together, then the second ones and so on, Zstandard finds both. Its fastest level does as well
as a slow one here. A word is a number of the state, whatever it is stored in.
"""

from __future__ import annotations

import numpy as np
import zstandard

from nsm_core.errors import SnapshotCorrupt

_LEVEL = 1
# A few bytes may not ask for gigabytes: what packs better than this is not packed.
MAX_RATIO = 64


def pack(raw: bytes, *, word_bytes: int) -> bytes | None:
    """`raw` packed; None when that is not worth it or not possible."""
    if not raw or len(raw) % word_bytes:
        return None
    planes = np.frombuffer(raw, np.uint8).reshape(-1, word_bytes).T
    packed = zstandard.ZstdCompressor(level=_LEVEL).compress(planes.tobytes())
    return packed if len(raw) <= MAX_RATIO * len(packed) and len(packed) < len(raw) else None


def unpack(packed: bytes | memoryview, num_bytes: int, *, word_bytes: int) -> bytes:
    """The `num_bytes` that `pack` was given. Raises SnapshotCorrupt for what it would not have written."""
    if num_bytes % word_bytes or num_bytes > MAX_RATIO * len(packed):
        raise SnapshotCorrupt(f"snapshot refused: {len(packed)} bytes do not hold a state of {num_bytes}")
    try:
        size = zstandard.frame_content_size(packed)
        planes = zstandard.ZstdDecompressor().decompress(packed, allow_extra_data=False) if size == num_bytes else b""
    except zstandard.ZstdError as error:
        raise SnapshotCorrupt("snapshot refused: the state cannot be unpacked") from error
    if len(planes) != num_bytes:
        raise SnapshotCorrupt(f"snapshot refused: the state does not unpack to {num_bytes} bytes")
    return np.frombuffer(planes, np.uint8).reshape(word_bytes, -1).T.tobytes()
