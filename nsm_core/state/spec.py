"""The tensors of one sequence's state: names, shapes, dtypes, bytes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nsm_core.errors import SnapshotCorrupt
from nsm_core.state.layout import POSITION as POSITION  # part of this contract, defined where there is no torch
from nsm_core.state.layout import TensorLayout

# One sequence's state is a flat dict of these tensors; everywhere in the model with a leading batch (or row) dimension.
State = dict[str, Tensor]

_NUMPY_DTYPES: dict[torch.dtype, np.dtype[Any]] = {torch.float32: np.dtype("<f4"), torch.int64: np.dtype("<i8")}


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the state, without its batch dimension."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True, slots=True)
class StateSpec:
    """The flat, fixed-shape layout of one sequence's state."""

    tensors: tuple[TensorSpec, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of one state; the same for every sequence, however long."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    def layout(self) -> tuple[TensorLayout, ...]:
        """The tensors as a snapshot's header names them."""
        return tuple(TensorLayout(t.name, t.shape, str(t.dtype).removeprefix("torch.")) for t in self.tensors)

    def zeros(
        self,
        num_rows: int,
        device: torch.device | str = "cpu",
        held_as: Mapping[str, torch.dtype] = MappingProxyType({}),
    ) -> State:
        """Storage for `num_rows` states: every tensor [num_rows, *shape]. `held_as`: other dtypes, by name."""
        return {
            t.name: torch.zeros((num_rows, *t.shape), dtype=held_as.get(t.name, t.dtype), device=device)
            for t in self.tensors
        }

    def pack(self, state: Mapping[str, Tensor], row: int = 0) -> bytes:
        """Row `row` of a batched state as bytes: the tensors in layout order, little endian, no padding."""
        tensors = [state[spec.name][row].detach().to(spec.dtype).contiguous() for spec in self.tensors]
        if tensors[0].is_cuda:
            return _bytes_from_gpu(tensors)
        # `join` copies, once
        return b"".join(tensor.numpy().astype(_NUMPY_DTYPES[tensor.dtype], copy=False).data for tensor in tensors)

    def read_position(self, raw: bytes) -> int:
        """The position in a packed state, without unpacking the rest. Raises SnapshotCorrupt as `unpack` does."""
        self._check_length(raw)
        spec, offset = next((spec, offset) for spec, offset in self._offsets() if spec.name == POSITION)
        return int.from_bytes(raw[offset : offset + spec.num_bytes], "little", signed=True)

    def unpack(self, raw: bytes, device: torch.device | None = None) -> State:
        """The inverse of `pack`: tensors [1, *shape], on a GPU if that is the device, whose work is not waited for.

        Raises SnapshotCorrupt when the length does not fit.
        """
        self._check_length(raw)
        if device is not None and device.type == "cuda":
            return self._unpack_on_gpu(raw, device)
        state: State = {}
        for spec, offset in self._offsets():
            values = np.frombuffer(raw, _NUMPY_DTYPES[spec.dtype], count=math.prod(spec.shape), offset=offset)
            state[spec.name] = torch.from_numpy(values.copy()).reshape(1, *spec.shape)
        return state

    def unpack_into(self, raw: bytes, state: Mapping[str, Tensor], row: int) -> None:
        """`unpack` into row `row` of a batched state on the CPU: one copy, where its dtypes are those of the spec."""
        self._check_length(raw)
        for spec, offset in self._offsets():
            values = np.frombuffer(raw, _NUMPY_DTYPES[spec.dtype], count=math.prod(spec.shape), offset=offset)
            values, target = values.reshape(spec.shape), state[spec.name][row]
            if target.dtype == spec.dtype:
                target.numpy()[...] = values
            else:
                target.copy_(torch.from_numpy(values.copy()))

    def _unpack_on_gpu(self, raw: bytes, device: torch.device) -> State:
        pinned = torch.empty(len(raw), dtype=torch.uint8, pin_memory=True)
        pinned.numpy()[:] = np.frombuffer(raw, np.uint8)
        there, state = pinned.to(device, non_blocking=True), State()
        for spec, offset in self._offsets():
            own = there[offset : offset + spec.num_bytes]
            # one that does not lie at a multiple of its size cannot be read where it is
            own = own if offset % spec.dtype.itemsize == 0 else own.clone()
            state[spec.name] = own.view(spec.dtype).reshape(1, *spec.shape)
        return state

    def _offsets(self) -> Iterator[tuple[TensorSpec, int]]:
        """Each tensor, and where it begins in a packed state."""
        offset = 0
        for spec in self.tensors:
            yield spec, offset
            offset += spec.num_bytes

    def _check_length(self, raw: bytes) -> None:
        if len(raw) != self.num_bytes:
            raise SnapshotCorrupt(f"a state of this model has {self.num_bytes} bytes, got {len(raw)}")


def _bytes_from_gpu(tensors: list[Tensor]) -> bytes:
    """One copy over the bus instead of one, and a wait, for each tensor."""
    there = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors])
    pinned = torch.empty(there.shape, dtype=torch.uint8, pin_memory=True)
    pinned.copy_(there, non_blocking=True)
    torch.cuda.current_stream(there.device).synchronize()
    return pinned.numpy().tobytes()
