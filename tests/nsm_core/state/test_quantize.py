from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsm_core.errors import NumericalError
from nsm_core.state.quantize import StateFormat, decode_state, encode_state, encoded_bytes
from nsm_core.state.spec import State, StateSpec, TensorSpec

SPEC = StateSpec(
    (
        TensorSpec("position", (), torch.int64),
        TensorSpec("layers.0.slots", (2, 3, 128), torch.float32),
        TensorSpec("layers.0.conv_tail", (3, 20), torch.float32),
        TensorSpec("layers.1.kv", (5, 2, 1, 64), torch.float32),
        TensorSpec("gain", (), torch.float32),
    )
)


def random_state(rows: int = 2, scale: float = 1.0) -> State:
    state = {
        tensor.name: scale * torch.randn(rows, *tensor.shape)
        for tensor in SPEC.tensors
        if tensor.dtype.is_floating_point
    }
    return {**state, "position": torch.arange(rows) + 2**40}


def round_trip(state: State, form: StateFormat) -> State:
    return decode_state(SPEC, encode_state(SPEC, state, form))


@pytest.mark.parametrize("form", list(StateFormat))
def test_names_shapes_dtypes_and_positions_survive(form: StateFormat) -> None:
    state = random_state()
    got = round_trip(state, form)
    assert {name: (value.shape, value.dtype) for name, value in got.items()} == {
        name: (value.shape, value.dtype) for name, value in state.items()
    }
    assert torch.equal(got["position"], state["position"])


def test_fp32_is_exact_and_fp16_rounds_once() -> None:
    state = random_state()
    for name, value in round_trip(state, StateFormat.FP32).items():
        assert torch.equal(value, state[name])
    for name, value in round_trip(state, StateFormat.FP16).items():
        assert torch.equal(value, state[name].half().to(value.dtype) if name != "position" else state[name])


@given(exponent=st.integers(-2, 3), seed=st.integers(0, 10**6))
def test_int8_errs_by_half_a_step_of_its_group(exponent: int, seed: int) -> None:
    torch.manual_seed(seed)
    state = random_state(scale=10.0**exponent)
    state["layers.0.slots"][..., 64:] *= 1000.0  # values much larger than keys: a scale of their own
    got = round_trip(state, StateFormat.INT8)
    for name, width in (("layers.0.slots", 64), ("layers.0.conv_tail", 20), ("layers.1.kv", 64)):
        groups, decoded = (values[name].unflatten(-1, (-1, width)) for values in (state, got))
        step = (groups.abs().amax(dim=-1, keepdim=True) / 127).clamp(min=2.0**-14)
        assert ((groups - decoded).abs() <= 0.57 * step).all()  # and the fp16 rounding of the scale


def test_int8_of_zeros_is_zero() -> None:
    got = round_trip(random_state(scale=0.0), StateFormat.INT8)
    assert not any(value.any() for name, value in got.items() if name != "position")


def test_decoding_twice_changes_nothing_more() -> None:
    once = round_trip(random_state(), StateFormat.INT8)
    for name, value in round_trip(once, StateFormat.INT8).items():
        torch.testing.assert_close(value, once[name], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("form", list(StateFormat))
def test_bytes_are_those_of_the_stored_tensors(form: StateFormat) -> None:
    encoded = encode_state(SPEC, random_state(rows=1), form)
    tensors = [*encoded.values.values(), *encoded.scales.values()]
    assert encoded_bytes(SPEC, form) == sum(tensor.numel() * tensor.itemsize for tensor in tensors)


@pytest.mark.parametrize(("form", "value"), [(StateFormat.FP16, 1e6), (StateFormat.INT8, 1e8)])
def test_numbers_that_do_not_fit_are_an_error(form: StateFormat, value: float) -> None:
    state = random_state()
    state["layers.1.kv"][0, 0, 0, 0, 0] = value
    with pytest.raises(NumericalError, match=r"layers\.1\.kv"):
        encode_state(SPEC, state, form)


def test_the_given_state_stays_as_it_was() -> None:
    state = random_state()
    before = {name: value.clone() for name, value in state.items()}
    round_trip(state, StateFormat.INT8)
    assert all(torch.equal(state[name], before[name]) for name in state)
