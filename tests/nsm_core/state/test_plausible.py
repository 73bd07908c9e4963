"""Numbers that no model's state holds."""

from __future__ import annotations

import numpy as np
import pytest

from nsm_core.state.plausible import MAX_MAGNITUDE, implausible_tensor
from nsm_core.state.snapshot import TensorLayout

LAYOUT = (
    TensorLayout("position", (), "int64"),
    TensorLayout("slots", (2, 3), "float32"),
    TensorLayout("kv", (4,), "float32"),
)


def state_with(offset: int, value: float) -> bytes:
    values = np.zeros(10, "<f4")
    values[offset] = value
    return (-1).to_bytes(8, "little", signed=True) + values.tobytes()  # a whole number is no float: NaN as bits


@pytest.mark.parametrize(("offset", "tensor"), [(0, "slots"), (5, "slots"), (6, "kv"), (9, "kv")])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38, -3e38, 1.1 * MAX_MAGNITUDE])
def test_the_tensor_is_named_wherever_the_number_is(offset: int, tensor: str, value: float) -> None:
    assert implausible_tensor(LAYOUT, state_with(offset, value)) == tensor


@pytest.mark.parametrize("value", [0.0, 1e-40, -65_504.0, MAX_MAGNITUDE, -MAX_MAGNITUDE])
def test_large_numbers_are_not_refused(value: float) -> None:
    assert implausible_tensor(LAYOUT, state_with(9, value)) is None
