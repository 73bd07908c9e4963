from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from nsm_core.errors import NumericalError, SnapshotCorrupt
from nsm_core.state.layout import TensorLayout
from nsm_core.state.quantize import FORMATS, StateFormat, decode_state, encode_state, group_len, stored_bytes

LAYOUT = (
    TensorLayout("position", (), "int64"),
    TensorLayout("layers.0.slots", (2, 3, 128), "float32"),
    TensorLayout("layers.0.conv_tail", (3, 20), "float32"),
    TensorLayout("layers.1.kv", (5, 2, 1, 64), "float32"),
    TensorLayout("gain", (), "float32"),
)
POSITION = (2**40 + 7).to_bytes(8, "little")
LOSSY = (StateFormat.FP16, StateFormat.INT8)
NUM_FLOATS = sum(tensor.num_values for tensor in LAYOUT[1:])

floats = hnp.arrays(np.float32, NUM_FLOATS, elements=st.floats(-6e4, 6e4, width=32), fill=st.just(np.float32(0.25)))


def random_floats(scale: float = 1.0) -> np.ndarray:
    return (scale * np.random.default_rng(0).standard_normal(NUM_FLOATS)).astype("<f4")


def raw_of(values: np.ndarray) -> bytes:
    return POSITION + values.astype("<f4").tobytes()


def round_trip(raw: bytes, form: StateFormat) -> bytes:
    return decode_state(LAYOUT, encode_state(LAYOUT, raw, form), form)


def tensors_of(raw: bytes) -> dict[str, np.ndarray]:
    """By name, as [groups, values of a group]; floats only."""
    values, start, found = np.frombuffer(raw, "<f4", offset=8), 0, {}
    for tensor in LAYOUT[1:]:
        found[tensor.name] = values[start : start + tensor.num_values].reshape(-1, group_len(tensor))
        start += tensor.num_values
    return found


def test_groups_are_a_heads_keys_and_values_or_the_whole_of_a_row() -> None:
    assert [group_len(tensor) for tensor in LAYOUT[1:]] == [64, 20, 64, 1]


def test_fp32_is_exact_and_fp16_rounds_once() -> None:
    values = random_floats()
    assert encode_state(LAYOUT, raw_of(values), StateFormat.FP32) == raw_of(values)
    assert round_trip(raw_of(values), StateFormat.FP32) == raw_of(values)
    assert round_trip(raw_of(values), StateFormat.FP16) == raw_of(values.astype("<f2"))


@given(floats)
def test_int8_errs_by_half_a_step_of_its_group(values: np.ndarray) -> None:
    decoded = tensors_of(round_trip(raw_of(values), StateFormat.INT8))
    for name, groups in tensors_of(raw_of(values)).items():
        step = np.maximum(np.abs(groups).max(axis=1, keepdims=True) / 127, 2.0**-14)
        assert (np.abs(groups - decoded[name]) <= 0.57 * step).all()  # and the fp16 rounding of the scale


@given(floats, st.sampled_from(list(StateFormat)))
def test_what_was_rounded_is_not_rounded_again(values: np.ndarray, form: StateFormat) -> None:
    stored = encode_state(LAYOUT, raw_of(values), form)
    decoded = decode_state(LAYOUT, stored, form)
    assert encode_state(LAYOUT, decoded, form) == stored
    assert decode_state(LAYOUT, encode_state(LAYOUT, decoded, form), form) == decoded


@pytest.mark.parametrize("form", list(StateFormat))
def test_positions_survive_and_zeros_are_zero(form: StateFormat) -> None:
    assert round_trip(raw_of(np.zeros(NUM_FLOATS)), form) == raw_of(np.zeros(NUM_FLOATS))
    assert round_trip(raw_of(random_floats()), form)[:8] == POSITION


@pytest.mark.parametrize("form", list(StateFormat))
def test_bytes_are_those_that_are_stored(form: StateFormat) -> None:
    num_scales = 12 + 3 + 10 + 1
    want = 8 + {"fp32": 4 * NUM_FLOATS, "fp16": 2 * NUM_FLOATS, "int8": NUM_FLOATS + 2 * num_scales}[form]
    assert stored_bytes(LAYOUT, form) == len(encode_state(LAYOUT, raw_of(random_floats()), form)) == want


@pytest.mark.parametrize("form", list(StateFormat))
def test_another_length_is_refused(form: StateFormat) -> None:
    stored = encode_state(LAYOUT, raw_of(random_floats()), form)
    for wrong in (stored[:-1], stored + b"\0", b""):
        with pytest.raises(SnapshotCorrupt, match="the layout has"):
            decode_state(LAYOUT, wrong, form)


@pytest.mark.parametrize(
    ("form", "value"),
    [(StateFormat.FP16, 1e6), (StateFormat.INT8, 1e8)]
    + [(form, value) for form in LOSSY for value in (np.inf, -np.inf, np.nan)],
)
def test_numbers_that_do_not_fit_are_an_error(form: StateFormat, value: float) -> None:
    values = random_floats()
    values[-2] = value
    with pytest.raises(NumericalError, match=r"layers\.1\.kv"):
        encode_state(LAYOUT, raw_of(values), form)


def test_large_values_do_not_spoil_the_keys_beside_them() -> None:
    values = random_floats()
    slots = values[: 6 * 128].reshape(6, 2, 64)
    slots[:, 1] *= 1000.0
    error = np.abs(tensors_of(round_trip(raw_of(values), StateFormat.INT8))["layers.0.slots"] - slots.reshape(12, 64))
    assert error[::2].max() < 0.02
    assert error[1::2].max() < 20.0


def test_names_of_dtypes_are_told_apart() -> None:
    assert {name: form.value for name, form in FORMATS.items()} == {
        "float32": "fp32",
        "float16": "fp16",
        "int8": "int8",
    }


def test_rounding_needs_no_torch() -> None:
    code = "import sys, nsm_core.state.quantize; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
