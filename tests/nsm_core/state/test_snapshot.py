from __future__ import annotations

import copy
import dataclasses
import json
import struct
import subprocess
import sys
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from nsm_core.errors import SnapshotCorrupt
from nsm_core.state.quantize import FORMATS
from nsm_core.state.snapshot import (
    SamplerState,
    Snapshot,
    SnapshotHeader,
    TensorLayout,
    replace_header,
)

LAYOUT = (TensorLayout("layers.0.slots", (1, 2, 2), "float32"), TensorLayout("position", (), "int64"))
STATE = bytes(range(24))

GOLDEN = (
    b"NSMSNAP\x00\x01\x00\x00\x00\xc5\x01\x00\x00\x18\x00\x00\x00\x00\x00\x00\x00"
    b'{"created_at":1700000000.5,"energy_joules":0.0,"layout":[{"dtype":"float32","name":"layers.0.slots",'
    b'"shape":[1,2,2]},{"dtype":"int64","name":"position","shape":[]}],"model_fingerprint":"m1","numerics":"cpu-fp32",'
    b'"parent":2,"pending_id":7,"position":41,"rounded_to":"float32","sampler":{"generated_counts":[[7,2],[260,1]],'
    b'"seed":18446744073709551615},"session_id":"s1","stored_dtype":"float32","tenant":"default",'
    b'"tokenizer_fingerprint":"t1","version":3}'
    b"\x00\x01\x02\x03\x04\x05\x06\x07\x08\t\n\x0b\x0c\r\x0e\x0f\x10\x11\x12\x13\x14\x15\x16\x17"
)


def make_header(**changes: Any) -> SnapshotHeader:
    fields: dict[str, Any] = {
        "model_fingerprint": "m1",
        "numerics": "cpu-fp32",
        "tokenizer_fingerprint": "t1",
        "layout": LAYOUT,
        "position": 41,
        "pending_id": 7,
        "sampler": SamplerState(seed=2**64 - 1, generated_counts={260: 1, 7: 2}),
        "tenant": "default",
        "session_id": "s1",
        "version": 3,
        "parent": 2,
        "created_at": 1_700_000_000.5,
    }
    return SnapshotHeader(**{**fields, **changes})


def seal(header: bytes, state: bytes = STATE, *, magic: bytes = b"NSMSNAP\0", version: int = 1) -> bytes:
    """What a faulty writer could have written: any header, with a checksum that fits."""
    body = magic + struct.pack("<IIQ", version, len(header), len(state)) + header + state
    return body + xxhash.xxh3_128_digest(body)


def header_json(**changes: Any) -> bytes:
    fields = json.loads(make_header().to_json())
    return json.dumps({**fields, **changes}, sort_keys=True, separators=(",", ":")).encode()


def test_the_byte_format_is_this_one() -> None:
    encoded = Snapshot(make_header(), STATE).encode()
    assert encoded == GOLDEN + bytes.fromhex("6c652b753276f261cd19117bb603035a")


def test_earlier_numerics_are_in_the_bytes_where_there_are_some() -> None:
    snapshot = Snapshot(make_header(earlier_numerics=("cpu/int4", "cpu/int8")), STATE)
    raw = snapshot.encode()
    assert b'"earlier_numerics":["cpu/int4","cpu/int8"]' in raw
    assert Snapshot.decode(raw) == snapshot


@pytest.mark.parametrize("earlier", [[], ["b", "a"], ["a", "a"], ["cpu-fp32"], [1], ["", "a"], "a", {}, None])
def test_earlier_numerics_that_no_build_writes_are_refused(earlier: object) -> None:
    with pytest.raises(SnapshotCorrupt):
        Snapshot.decode(seal(header_json(earlier_numerics=earlier)))


def test_parts_are_the_whole_and_a_view_is_as_good_as_bytes() -> None:
    snapshot = Snapshot(make_header(), STATE)
    raw = snapshot.encode()
    assert b"".join(snapshot.encode_parts()) == raw
    framed = memoryview(b"before" + raw)[len(b"before") :]
    decoded = Snapshot.decode(framed)
    assert decoded == snapshot
    assert isinstance(decoded.state, bytes)


def test_decode_gives_back_what_was_encoded() -> None:
    snapshot = Snapshot(make_header(pending_id=None), STATE)
    assert Snapshot.decode(snapshot.encode()) == snapshot


def test_a_packed_snapshot_decodes_to_the_same() -> None:
    snapshot = Snapshot(make_header(), STATE)
    assert Snapshot.decode(snapshot.encode(is_packed=True)) == snapshot


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_replaced_header_leaves_the_states_bytes_packed_or_not(is_packed: bool) -> None:
    snapshot = Snapshot(make_header(), STATE)
    renamed = dataclasses.replace(snapshot.header, session_id="another")
    found = replace_header(snapshot.encode(is_packed=is_packed), renamed)
    assert found == Snapshot(renamed, STATE).encode(is_packed=is_packed)


def test_equal_snapshots_have_equal_bytes_whatever_the_order_of_their_counts() -> None:
    swapped = SamplerState(seed=2**64 - 1, generated_counts=MappingProxyType({7: 2, 260: 1}))
    assert Snapshot(make_header(sampler=swapped), STATE).encode() == Snapshot(make_header(), STATE).encode()


@pytest.mark.parametrize("is_packed", [False, True])
def test_every_flipped_bit_is_refused(is_packed: bool) -> None:
    raw = Snapshot(make_header(), STATE).encode(is_packed=is_packed)
    for index in range(len(raw)):
        for bit in range(8):
            broken = bytearray(raw)
            broken[index] ^= 1 << bit
            with pytest.raises(SnapshotCorrupt):
                Snapshot.decode(bytes(broken))


def test_every_cut_is_refused() -> None:
    raw = Snapshot(make_header(), STATE).encode()
    for length in range(len(raw)):
        with pytest.raises(SnapshotCorrupt):
            Snapshot.decode(raw[:length])
        with pytest.raises(SnapshotCorrupt):
            Snapshot.decode(raw[length + 1 :])


def test_trailing_bytes_are_refused() -> None:
    raw = Snapshot(make_header(), STATE).encode()
    with pytest.raises(SnapshotCorrupt, match="bytes expected"):
        Snapshot.decode(raw + b"\0")


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(raw: bytes) -> None:
    with pytest.raises(SnapshotCorrupt):
        Snapshot.decode(raw)
    with pytest.raises(SnapshotCorrupt):
        Snapshot.decode(seal(raw))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from([field.name for field in dataclasses.fields(SnapshotHeader)]), json_values)
def test_a_wrong_header_with_a_right_checksum_is_refused_or_read_as_written(name: str, value: Any) -> None:
    raw = seal(header_json(**{name: value}))
    try:
        snapshot = Snapshot.decode(raw)
    except SnapshotCorrupt:
        return
    assert snapshot.encode() == raw
    assert snapshot.state == STATE


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "too few"),
        (seal(header_json(), magic=b"NSMSNAPX"), "magic"),
        (seal(header_json(), version=3), "format version 3, this build reads versions 1 and 2"),
        (seal(header_json(), version=0), "format version 0"),
        (seal(header_json(), STATE[:-1]), "the layout has 24 bytes, the state 23"),
        (seal(b"[" * 100_000), "not JSON"),
        (seal(b'{"version":NaN}'), "not JSON"),
        (seal(b"{}"), "fields"),
        (seal(header_json(extra=1)), "fields"),
        (seal(header_json() + b" "), "canonical"),
        (seal(header_json(position=True)), "position"),
        (seal(header_json(position=0)), "position"),
        (seal(header_json(pending_id=2**32)), "pending"),
        (seal(header_json(version=0)), "version"),
        (seal(header_json(parent=3)), "parent"),
        (seal(header_json(tenant="")), "tenant"),
        (seal(header_json(session_id=5)), "session_id"),
        (
            seal(header_json(stored_dtype="bfloat16")),
            "stored_dtype 'bfloat16', this build reads float32, float16, int8",
        ),
        (seal(header_json(stored_dtype=[])), "stored_dtype"),
        (seal(header_json(stored_dtype="int8")), "a state in int8 that was rounded to float32"),
        (
            seal(header_json(stored_dtype="int8", rounded_to="float16")),
            "in int8 that was rounded to float16",
        ),
        (seal(header_json(rounded_to=4)), "rounded_to 4"),
        (seal(header_json(energy_joules=-1.0)), "energy -1.0"),
        (seal(header_json(energy_joules=1)), "energy 1"),
        (seal(header_json(stored_dtype="float16", rounded_to="float16")), "has 16 bytes, the state 24"),
        (seal(header_json(created_at=-1.0)), "date"),
        (seal(header_json(layout={})), "layout"),
        (seal(header_json(layout=[["position", [], "int64"]])), "layout"),
        (seal(header_json(layout=[{"name": "a", "shape": [], "dtype": "int64", "order": "F"}])), "canonical|layout"),
        (seal(header_json(layout=[{"name": "a", "shape": [-6], "dtype": "float32"}])), "shape"),
        (seal(header_json(layout=[{"name": "a", "shape": [6], "dtype": "float16"}])), "dtype"),
        (seal(header_json(sampler={"seed": 2**64, "generated_counts": []})), "seed"),
        (seal(header_json(sampler={"seed": 1, "generated_counts": [[1, 0]]})), "count"),
        (seal(header_json(sampler={"seed": 1, "generated_counts": [[1, 1], [1, 2]]})), "canonical"),
        (seal(header_json(sampler={"seed": 1})), "sampler"),
    ],
)
def test_the_reason_is_given(raw: bytes, reason: str) -> None:
    with pytest.raises(SnapshotCorrupt, match=reason):
        Snapshot.decode(raw)


def test_a_state_that_does_not_fit_its_layout_cannot_be_encoded() -> None:
    with pytest.raises(SnapshotCorrupt, match="the layout has 24 bytes, the state 5"):
        Snapshot(make_header(), b"12345")


def test_parse_layout_reads_what_a_state_spec_says() -> None:
    torch = pytest.importorskip("torch")
    from nsm_core.state.spec import StateSpec, TensorSpec

    spec = StateSpec((TensorSpec("layers.0.slots", (1, 2, 2), torch.float32), TensorSpec("position", (), torch.int64)))
    assert spec.layout() == LAYOUT
    assert make_header().state_bytes == spec.num_bytes


def test_reading_snapshots_needs_no_torch() -> None:
    code = "import sys, nsm_core.state.snapshot; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_M6_energy_of_a_session_comes_back_with_its_state(dtype: str) -> None:
    free = rounded_snapshot(dtype)
    metered = dataclasses.replace(free, header=dataclasses.replace(free.header, energy_joules=12.25))
    assert Snapshot.decode(metered.encode()).header.energy_joules == 12.25
    assert Snapshot.decode(free.encode()).header.energy_joules == 0.0


SLOTS = (TensorLayout("position", (), "int64"), TensorLayout("slots", (8, 128), "float32"))
LOSSY = ("float16", "int8")


def rounded_snapshot(dtype: str, *, scale: float = 1.0) -> Snapshot:
    numbers = (scale * np.random.default_rng(0).standard_normal(8 * 128)).astype("<f4")
    numbers[:512] = scale  # slots that nobody wrote to
    return Snapshot(
        make_header(layout=SLOTS, stored_dtype=dtype, rounded_to=dtype), struct.pack("<q", 41) + numbers.tobytes()
    )


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_state_is_rounded_once_and_then_stays_what_it_is(dtype: str) -> None:
    raw = rounded_snapshot(dtype).encode()
    snapshot = Snapshot.decode(raw)
    assert snapshot.header == make_header(layout=SLOTS, stored_dtype=dtype, rounded_to=dtype)
    assert snapshot.encode() == raw
    exact, rounded = (np.frombuffer(one.state, "<f4", offset=8) for one in (rounded_snapshot(dtype), snapshot))
    largest = {"float32": 0.0, "float16": 2e-3, "int8": 2e-2}[dtype]
    assert np.abs(exact - rounded).max() <= largest
    assert snapshot.state[:8] == struct.pack("<q", 41)


@pytest.mark.parametrize(("dtype", "num_bytes"), [("float32", 4104), ("float16", 2056), ("int8", 8 + 1024 + 32)])
def test_the_state_takes_the_bytes_of_its_dtype(dtype: str, num_bytes: int) -> None:
    snapshot = rounded_snapshot(dtype)
    assert snapshot.header.stored_bytes == num_bytes
    assert len(snapshot.encode()) == 24 + len(snapshot.header.to_json()) + num_bytes + 16


@pytest.mark.parametrize("dtype", LOSSY)
def test_every_damaged_byte_of_a_rounded_snapshot_is_refused(dtype: str) -> None:
    raw = rounded_snapshot(dtype).encode()
    for index in range(len(raw)):
        with pytest.raises(SnapshotCorrupt):
            Snapshot.decode(raw[:index] + bytes((raw[index] ^ 1 << index % 8,)) + raw[index + 1 :])
    for length in range(0, len(raw), 7):
        with pytest.raises(SnapshotCorrupt):
            Snapshot.decode(raw[:length])


@given(st.sampled_from(LOSSY), st.binary(max_size=1200))
def test_a_state_of_any_bytes_is_refused_or_read(dtype: str, state: bytes) -> None:
    header = make_header(layout=SLOTS, stored_dtype=dtype, rounded_to=dtype)
    try:
        snapshot = Snapshot.decode(seal(header.to_json(), state))
    except SnapshotCorrupt:
        return
    assert len(snapshot.state) == header.state_bytes


@pytest.mark.parametrize("dtype", LOSSY)
def test_numbers_that_do_not_fit_are_stored_in_float32(dtype: str) -> None:
    snapshot = rounded_snapshot(dtype, scale=1e9)
    decoded = Snapshot.decode(snapshot.encode())
    assert decoded.header == make_header(layout=SLOTS, rounded_to=dtype)
    assert decoded.state == snapshot.state


def test_a_state_that_was_rounded_once_says_so_in_whatever_dtype_it_is_stored_later() -> None:
    snapshot = dataclasses.replace(rounded_snapshot("int8"), header=make_header(layout=SLOTS, rounded_to="int8"))
    assert Snapshot.decode(snapshot.encode()) == snapshot


@pytest.mark.parametrize(
    "value", [None, True, -1, 0, 1, 7, 2**70, 1.0, float("nan"), float("inf"), "", "x", (), ("a",)]
)
def test_a_header_that_looks_usual_passes_every_check(value: Any) -> None:
    usual = make_header()
    for field in dataclasses.fields(SnapshotHeader):
        if field.name in ("layout", "sampler"):  # which are checked where they are made
            continue
        changed = copy.copy(usual)
        object.__setattr__(changed, field.name, value)
        if changed._is_usual():
            changed._check()
    assert usual._is_usual()
