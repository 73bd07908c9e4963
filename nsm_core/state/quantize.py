"""Smaller forms of a state that lies still: half precision, or int8 with one scale for each row of values.

For storage only. A recurrence that runs on rounded states adds one rounding error per token (docs/model.md).
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from nsm_core.errors import NumericalError
from nsm_core.state.spec import State, StateSpec, TensorSpec

# Values that share an int8 scale: a slot's key, its value and a cached key lie apart when a head is 64 wide.
GROUP_LEN = 64
# The smallest normal fp16 number: below it a scale itself has no precision left.
_MIN_SCALE = torch.finfo(torch.float16).tiny


class StateFormat(enum.StrEnum):
    """How the floating-point tensors of a state are stored; int64 tensors stay as they are in all of them."""

    FP32 = "fp32"
    FP16 = "fp16"
    INT8 = "int8"


@dataclasses.dataclass(frozen=True, slots=True)
class EncodedState:
    """A batch of states in one format. `scales` (int8 only): fp16, one for each group of the last dimension."""

    format: StateFormat
    values: Mapping[str, Tensor]  # [B, *shape]
    scales: Mapping[str, Tensor]  # [B, *shape[:-1], groups]


def encode_state(spec: StateSpec, state: Mapping[str, Tensor], form: StateFormat) -> EncodedState:
    """Rounds `state` [B, *shape] to `form`. Raises NumericalError when a number does not fit into it."""
    values: dict[str, Tensor] = {}
    scales: dict[str, Tensor] = {}
    for tensor in spec.tensors:
        value = state[tensor.name]
        if not tensor.dtype.is_floating_point or form is StateFormat.FP32:
            values[tensor.name] = value
        elif form is StateFormat.FP16:
            values[tensor.name] = _finite(value.to(torch.float16), tensor.name)
        else:
            values[tensor.name], scales[tensor.name] = _quantize(value, tensor)
    return EncodedState(form, values, scales)


def decode_state(spec: StateSpec, encoded: EncodedState) -> State:
    """The inverse of `encode_state`, in the dtypes of `spec`."""
    state: State = {}
    for tensor in spec.tensors:
        value = encoded.values[tensor.name].to(tensor.dtype)
        scale = encoded.scales.get(tensor.name)
        state[tensor.name] = value if scale is None else _scaled(value, scale, tensor)
    return state


def encoded_bytes(spec: StateSpec, form: StateFormat) -> int:
    """Bytes of one state in `form`, scales included."""
    return sum(_tensor_bytes(tensor, form) for tensor in spec.tensors)


def _tensor_bytes(tensor: TensorSpec, form: StateFormat) -> int:
    if not tensor.dtype.is_floating_point or form is StateFormat.FP32:
        return tensor.num_bytes
    count = math.prod(tensor.shape)
    return 2 * count if form is StateFormat.FP16 else count + 2 * (count // _group_len(tensor))


def _group_len(tensor: TensorSpec) -> int:
    """Length of a group: GROUP_LEN where the last dimension is a multiple of it, else the whole of it."""
    width = tensor.shape[-1] if tensor.shape else 1
    return GROUP_LEN if width % GROUP_LEN == 0 else width


def _grouped(value: Tensor, tensor: TensorSpec) -> Tensor:
    """[B, *shape] -> [B, *shape[:-1], groups, group length]."""
    rows = value if tensor.shape else value[..., None]
    return torch.unflatten(rows, -1, (-1, _group_len(tensor)))


def _quantize(value: Tensor, tensor: TensorSpec) -> tuple[Tensor, Tensor]:
    """Symmetric, by the absolute maximum of each group: int8 [B, *shape] and fp16 scales."""
    groups = _grouped(value.float(), tensor)
    scale = (groups.abs().amax(dim=-1) / 127.0).clamp(min=_MIN_SCALE).to(torch.float16)
    _finite(scale, tensor.name)
    # By the scale as it is stored, so that its own rounding costs nothing
    quantized = (groups / scale.float()[..., None]).round().clamp(-127, 127).to(torch.int8)
    return quantized.reshape(value.shape), scale


def _scaled(value: Tensor, scale: Tensor, tensor: TensorSpec) -> Tensor:
    return (_grouped(value, tensor) * scale.to(value.dtype)[..., None]).reshape(value.shape)


def _finite(value: Tensor, name: str) -> Tensor:
    if not torch.isfinite(value).all():
        raise NumericalError(f"the state tensor {name} holds numbers that this format cannot store")
    return value
