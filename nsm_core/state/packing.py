"""A stored state in fewer bytes, without loss: zstd over byte planes. No torch.

Floats of a state share signs and exponents, and their mantissas look random. So the first bytes of all numbers stand
together, then the second bytes, and so on. Of a long session's fp32 state 84 to 86 % are left, after 7 ms of CPU for
3.8 MB and 3 ms on the way back; bytes that lie as they are leave 93 % (`python -m benchmarks.state_packing`).
"""

from __future__ import annotations

import numpy as np
import zstandard

from nsm_core.errors import SnapshotCorrupt

WORD_BYTES = 4
LEVEL = 1  # level 3 takes twice as long, and leaves a little more


def pack_state(state: bytes) -> bytes:
    """One zstd frame that knows its content's length."""
    return zstandard.ZstdCompressor(level=LEVEL).compress(_to_planes(state))


def unpack_state(packed: bytes | memoryview, *, num_bytes: int) -> bytes:
    """The inverse. Raises SnapshotCorrupt unless exactly `num_bytes` come out, which is checked before any is made."""
    try:
        num_found = zstandard.frame_content_size(packed)
        if num_found != num_bytes:
            raise SnapshotCorrupt(f"snapshot refused: the packed state has {num_found} bytes, the layout {num_bytes}")
        planes = zstandard.ZstdDecompressor().decompress(packed, max_output_size=num_bytes)
    except zstandard.ZstdError as error:
        raise SnapshotCorrupt(f"snapshot refused: the packed state is damaged ({error})") from error
    return _from_planes(planes)


def _to_planes(raw: bytes) -> bytes:
    """Bytes at the end that are no whole number stay there."""
    end = _end_of_words(raw)
    return _joined(np.frombuffer(raw, np.uint8, end).reshape(-1, WORD_BYTES).T.tobytes(), raw[end:])


def _from_planes(raw: bytes) -> bytes:
    """The inverse. By sums of whole planes: to transpose them takes 8 times as long."""
    end = _end_of_words(raw)
    planes = np.frombuffer(raw, np.uint8, end).reshape(WORD_BYTES, -1)
    words = planes[-1].astype("<u4")
    for plane in planes[-2::-1]:
        words <<= 8
        words |= plane
    return _joined(words.tobytes(), raw[end:])


def _end_of_words(raw: bytes) -> int:
    return len(raw) - len(raw) % WORD_BYTES


def _joined(words: bytes, rest: bytes) -> bytes:
    """A copy of megabytes takes milliseconds."""
    return words + rest if rest else words
