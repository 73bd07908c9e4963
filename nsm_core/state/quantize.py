"""Stored states in fewer bytes, with loss: half precision, or int8 with one scale for each row of values. No torch.

For storage only. A recurrence that runs on rounded states adds one rounding error per token (docs/model.md).

A decoded state encodes to the same bytes again, in both: a state may be copied, exported and stored anew as often as
one likes, and is rounded once.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nsm_core.errors import NumericalError, SnapshotCorrupt
from nsm_core.state.layout import FLOAT, TensorLayout

Floats = NDArray[np.float32]

# Values that share an int8 scale: a slot's key, its value and a cached key lie apart when a head is 64 wide.
GROUP_LEN = 64
_FP32, _FP16 = np.dtype("<f4"), np.dtype("<f2")
# The smallest normal fp16 number: below it a scale itself has no precision left.
_MIN_SCALE = np.finfo(np.float16).tiny
_MAX_STEP = 127


class StateFormat(enum.StrEnum):
    """How the floating-point tensors of a state are stored; int64 tensors stay as they are in all of them."""

    FP32 = "fp32"
    FP16 = "fp16"
    INT8 = "int8"

    @property
    def dtype(self) -> str:
        """The name of its numbers' dtype, as a snapshot's header has it."""
        return _DTYPES[self]

    @property
    def word_bytes(self) -> int:
        """Bytes of one of its numbers."""
        return _WORD_BYTES[self]


_DTYPES = {StateFormat.FP32: FLOAT, StateFormat.FP16: "float16", StateFormat.INT8: "int8"}
_WORD_BYTES = {StateFormat.FP32: 4, StateFormat.FP16: 2, StateFormat.INT8: 1}
FORMATS = {one.dtype: one for one in StateFormat}


def coarsest(*formats: StateFormat) -> StateFormat:
    """The one that loses most."""
    return min(formats, key=lambda one: one.word_bytes)


def encode_state(layout: Sequence[TensorLayout], raw: bytes, state_format: StateFormat) -> bytes:
    """A running state's bytes (`StateSpec.pack`) as `state_format` stores them, tensor by tensor. In int8 the scales of
    a tensor follow its numbers.

    Raises NumericalError when a number does not fit into `state_format`.
    """
    if state_format is StateFormat.FP32:
        return raw
    parts, offset = [], 0
    for tensor in layout:
        part = raw[offset : offset + tensor.num_bytes]
        offset += tensor.num_bytes
        parts.append(_encode_floats(part, tensor, state_format) if tensor.dtype == FLOAT else part)
    return b"".join(parts)


def decode_state(layout: Sequence[TensorLayout], stored: bytes, state_format: StateFormat) -> bytes:
    """The inverse of `encode_state`, but for its rounding. Raises SnapshotCorrupt when the length does not fit."""
    want = stored_bytes(layout, state_format)
    if len(stored) != want:
        raise SnapshotCorrupt(f"snapshot refused: the layout has {want} bytes, the state {len(stored)}")
    if state_format is StateFormat.FP32:
        return stored
    parts, offset = [], 0
    for tensor in layout:
        part = stored[offset : offset + _tensor_bytes(tensor, state_format)]
        offset += len(part)
        parts.append(_decode_floats(part, tensor, state_format) if tensor.dtype == FLOAT else part)
    return b"".join(parts)


def rounded_state(layout: Sequence[TensorLayout], raw: bytes, state_format: StateFormat) -> bytes:
    """`raw` after it was stored in `state_format` and read; `raw` itself where it does not fit and stays in fp32."""
    try:
        return decode_state(layout, encode_state(layout, raw, state_format), state_format)
    except NumericalError:
        return raw


def stored_bytes(layout: Sequence[TensorLayout], state_format: StateFormat) -> int:
    """Bytes of one state in `state_format`, scales included."""
    return sum(_tensor_bytes(tensor, state_format) for tensor in layout)


def group_len(tensor: TensorLayout) -> int:
    """How many neighbours share a scale: GROUP_LEN where the last dimension is a multiple of it, else all of it."""
    width = tensor.shape[-1] if tensor.shape else 1
    return GROUP_LEN if width % GROUP_LEN == 0 else width


def _tensor_bytes(tensor: TensorLayout, state_format: StateFormat) -> int:
    if tensor.dtype != FLOAT:
        return tensor.num_bytes
    num_scales = tensor.num_values // group_len(tensor) if state_format is StateFormat.INT8 else 0
    return state_format.word_bytes * tensor.num_values + _FP16.itemsize * num_scales


def _encode_floats(raw: bytes, tensor: TensorLayout, state_format: StateFormat) -> bytes:
    values: Floats = np.frombuffer(raw, _FP32)
    with np.errstate(over="ignore", invalid="ignore"):  # a number that does not fit raises below
        if state_format is StateFormat.FP16:
            halves: NDArray[np.float16] = values.astype(_FP16)
            _require_finite(halves, tensor)
            return halves.tobytes()
        groups = values.reshape(-1, group_len(tensor))
        largest = np.abs(groups).max(axis=1)
        scales: NDArray[np.float16] = np.maximum(largest / np.float32(_MAX_STEP), _MIN_SCALE).astype(_FP16)
    _require_finite(scales, tensor)
    # By the scale as it is stored, so that its own rounding costs nothing
    steps: Floats = np.rint(groups / scales.astype(_FP32)[:, None]).clip(-_MAX_STEP, _MAX_STEP)
    return steps.astype(np.int8).tobytes() + scales.tobytes()


def _decode_floats(stored: bytes, tensor: TensorLayout, state_format: StateFormat) -> bytes:
    if state_format is StateFormat.FP16:
        return np.frombuffer(stored, _FP16).astype(_FP32).tobytes()
    steps = np.frombuffer(stored, np.int8, count=tensor.num_values).reshape(-1, group_len(tensor))
    scales = np.frombuffer(stored, _FP16, offset=tensor.num_values).astype(_FP32)
    values: Floats = steps.astype(_FP32) * scales[:, None]
    return values.tobytes()


def _require_finite(values: NDArray[np.float16], tensor: TensorLayout) -> None:
    if not np.isfinite(values).all():
        raise NumericalError(f"the state tensor {tensor.name} holds numbers that this format cannot store")
