"""The tensors of a stored state, as its header names them. No torch here: the torch side is `StateSpec`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from nsm_core.errors import SnapshotCorrupt
from nsm_core.state.checks import is_int, is_text, require

# The tensor [] int64 that every state has: the number of tokens fed.
POSITION = "position"
FLOAT = "float32"  # the dtype of states that run; counts beside them are int64

_DTYPE_BYTES = {FLOAT: 4, "int64": 8}
_MAX_DIMS = 8


@dataclasses.dataclass(frozen=True, slots=True)
class TensorLayout:
    """One tensor of a state, from `StateSpec.layout`."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        require(is_text(self.name), f"tensor name {self.name!r}")
        require(is_text(self.dtype) and self.dtype in _DTYPE_BYTES, f"dtype {self.dtype!r} of {self.name}")
        valid_shape = len(self.shape) <= _MAX_DIMS and all(is_int(size, 1, 2**31) for size in self.shape)
        require(valid_shape, f"shape {self.shape} of {self.name}")

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """While it runs, in full precision."""
        return self.num_values * _DTYPE_BYTES[self.dtype]


@dataclasses.dataclass(frozen=True, slots=True)
class StateLayout:
    """A whole state: `StateSpec` without torch."""

    tensors: tuple[TensorLayout, ...]

    @property
    def num_bytes(self) -> int:
        """While it runs, in full precision."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    def read_position(self, raw: bytes) -> int:
        """As `StateSpec.read_position`."""
        if len(raw) != self.num_bytes:
            raise SnapshotCorrupt(f"a state of this model has {self.num_bytes} bytes, got {len(raw)}")
        index = next(index for index, tensor in enumerate(self.tensors) if tensor.name == POSITION)
        offset = sum(tensor.num_bytes for tensor in self.tensors[:index])
        return int.from_bytes(raw[offset : offset + self.tensors[index].num_bytes], "little", signed=True)


def parse_layout(tensors: Iterable[Mapping[str, Any]]) -> tuple[TensorLayout, ...]:
    """Tensors from their JSON objects {name, shape, dtype}. Raises SnapshotCorrupt."""
    return tuple(_parse_tensor(tensor) for tensor in tensors)


def _parse_tensor(fields: Mapping[str, Any]) -> TensorLayout:
    try:
        name, shape, dtype = fields["name"], tuple(fields["shape"]), fields["dtype"]
    except (TypeError, KeyError) as error:
        raise SnapshotCorrupt("snapshot refused: a tensor's layout is not {name, shape, dtype}") from error
    return TensorLayout(name, shape, dtype)
