from __future__ import annotations

import os
import struct

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from nsm_core.errors import SnapshotCorrupt
from nsm_core.state.packing import pack_state, unpack_state


@given(st.binary(max_size=300))
def test_what_is_packed_comes_out_as_it_was(state: bytes) -> None:
    assert unpack_state(pack_state(state), num_bytes=len(state)) == state


def test_floats_of_one_size_take_fewer_bytes() -> None:
    state = struct.pack("<4096f", *(1.0 + byte / 512 for byte in os.urandom(4096)))
    assert len(pack_state(state)) < 0.5 * len(state)


@pytest.mark.parametrize("num_bytes", [0, 63, 65])
def test_another_length_than_the_layouts_is_refused(num_bytes: int) -> None:
    with pytest.raises(SnapshotCorrupt, match=f"64 bytes, the layout {num_bytes}"):
        unpack_state(pack_state(bytes(64)), num_bytes=num_bytes)


def test_a_frame_that_claims_too_much_is_refused_before_it_is_read() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(10**7))
    with pytest.raises(SnapshotCorrupt):
        unpack_state(bomb, num_bytes=64)


@pytest.mark.parametrize("packed", [b"", b"no frame at all", pack_state(bytes(64))[:-1]], ids=["none", "other", "cut"])
def test_a_damaged_frame_is_refused(packed: bytes) -> None:
    with pytest.raises(SnapshotCorrupt):
        unpack_state(packed, num_bytes=64)
