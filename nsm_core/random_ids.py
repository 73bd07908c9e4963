"""Random ids and seeds, from the system's generator, many at a time: a call of it gives up the interpreter lock, and a
busy event loop waits to get it back.
"""

from __future__ import annotations

import os

ID_BYTES = 16
NUM_AT_ONCE = 256

_ready: list[bytes] = []  # of ID_BYTES each
os.register_at_fork(after_in_child=_ready.clear)  # no two processes may have the same


def random_id() -> str:
    """32 hexadecimal digits that nothing else has, and nobody can guess."""
    return _take().hex()


def random_bits(number: int) -> int:
    """In [0, 2^number); `number`: at most 128."""
    return int.from_bytes(_take(), "little") & ((1 << number) - 1)


def _take() -> bytes:
    try:
        return _ready.pop()  # in one step, whatever other threads do
    except IndexError:
        raw = os.urandom(ID_BYTES * NUM_AT_ONCE)
        _ready.extend(raw[start : start + ID_BYTES] for start in range(ID_BYTES, len(raw), ID_BYTES))
        return raw[:ID_BYTES]
