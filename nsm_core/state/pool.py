"""The rows that hold the states of running sequences: one owner, leased and freed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from nsm_core.state.pages import Pages
from nsm_core.state.row_copies import RowCopy, StateRows, copy_rows
from nsm_core.state.spec import State, StateSpec
from nsm_core.state.to_device import to_device

# What a freed row reads as in its int64 tensors, where there is no NaN.
POISON_INT = torch.iinfo(torch.int64).min


class StatePool:
    """Storage for `num_rows` states. Only leased rows can be read or written; everything else raises RuntimeError.

    `poison`: free rows are filled with NaN, so that a read of one shows in the output (debugging and tests).
    `held_as`: tensors that lie here in another dtype than the spec's, by name. What comes in is rounded to it, what
    goes out has the spec's dtype; what came out and goes in again is the same to the bit.

    Raises MemoryError when the rows do not fit.
    """

    def __init__(
        self,
        spec: StateSpec,
        num_rows: int,
        device: torch.device | str = "cpu",
        *,
        poison: bool = False,
        held_as: Mapping[str, torch.dtype] = MappingProxyType({}),
    ) -> None:
        self.spec = spec
        self.num_rows = num_rows
        self._dtypes = {tensor.name: tensor.dtype for tensor in spec.tensors}
        self._pages: list[Pages] = []
        if torch.device(device).type == "cpu":
            self._storage = self._map(held_as)
        else:
            self._storage = _allocate(spec, num_rows, device, held_as)
        self._rows = StateRows(self._storage)
        self._last_filled: tuple[Mapping[str, Tensor], StateRows] | None = None
        self._leased: set[int] = set()
        self.poison = poison
        if poison:
            for row in range(num_rows):
                self._fill_with_poison(row)

    @property
    def num_leased(self) -> int:
        return len(self._leased)

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows, leased or not."""
        return sum(tensor.nbytes for tensor in self._storage.values())

    @property
    def tensors(self) -> State:
        """Storage of all rows, [num_rows, *shape], as it is held, for an executor that works on its rows in place."""
        return self._storage

    def lease(self, row: int) -> None:
        """The row belongs to the caller until `free`; its content means nothing before `write`."""
        if not 0 <= row < self.num_rows:
            raise RuntimeError(f"the pool has rows 0 to {self.num_rows - 1}, got {row}")
        if row in self._leased:
            raise RuntimeError(f"row {row} is leased already")
        self._leased.add(row)

    def free(self, row: int) -> None:
        """The row may be leased again; its old content is lost."""
        self.check_leased((row,))
        self._leased.remove(row)
        if self.poison:
            self._fill_with_poison(row)

    def gather(self, rows: Sequence[int]) -> State:
        """Tensors [len(rows), *shape]. May share memory with the pool: read it, and only until the next write."""
        self.check_leased(rows)
        if is_contiguous(rows):
            held = {name: tensor[rows[0] : rows[-1] + 1] for name, tensor in self._storage.items()}
        else:
            index = self._index(rows)
            held = {name: tensor.index_select(0, index) for name, tensor in self._storage.items()}
        return {name: tensor.to(self._dtypes[name]) for name, tensor in held.items()}

    def scatter(self, rows: Sequence[int], state: Mapping[str, Tensor]) -> None:
        """Entry i of `state` [len(rows), *shape] becomes the content of rows[i]; a copy."""
        self.check_leased(rows)
        if is_contiguous(rows):
            for name, tensor in self._storage.items():
                tensor[rows[0] : rows[-1] + 1].copy_(state[name])
            return
        index = self._index(rows)
        for name, tensor in self._storage.items():
            tensor.index_copy_(0, index, state[name].to(tensor.dtype))

    def write(self, row: int, state: Mapping[str, Tensor]) -> None:
        """A state [1, *shape] becomes the content of the row; a copy."""
        self.scatter((row,), state)

    def fill(self, rows: Sequence[int], state: Mapping[str, Tensor]) -> None:
        """One state [1, *shape] becomes the content of all the rows, which are rising; neighbours by one copy. It stays
        as it is."""
        self.check_leased(rows)
        if self._rows.parts is not None:  # one launch, not one for each tensor
            source = self._as_held(state)
            copy_rows([RowCopy(self._rows, row, source, 0) for row in rows])
            return
        starts = [index for index, row in enumerate(rows) if index == 0 or row != rows[index - 1] + 1]
        for start, stop in zip(starts, [*starts[1:], len(rows)], strict=True):
            for name, tensor in self._storage.items():
                tensor[rows[start] : rows[stop - 1] + 1].copy_(state[name])

    def _as_held(self, state: Mapping[str, Tensor]) -> StateRows:
        """A state [1, *shape] in the dtypes of the rows; the last one is remembered, for it mostly is the start."""
        if self._last_filled is None or self._last_filled[0] is not state:
            held = {name: state[name].to(tensor.dtype).contiguous() for name, tensor in self._storage.items()}
            self._last_filled = state, StateRows(held)
        return self._last_filled[1]

    def copy(self, row: int) -> State:
        """The row's state [1, *shape], in memory of its own."""
        return {name: tensor.clone() for name, tensor in self.gather((row,)).items()}

    @property
    def rows(self) -> StateRows:
        """All rows as they are held, for copies of single ones."""
        return self._rows

    def pack(self, row: int) -> bytes:
        """The row's state as `StateSpec.pack` writes it."""
        self.check_leased((row,))
        return self.spec.pack(self._storage, row)

    def unpack(self, row: int, raw: bytes) -> None:
        """The inverse of `pack`: `raw` becomes the content of the row, by one copy. A GPU's work is not waited for.

        Raises SnapshotCorrupt when the length does not fit.
        """
        self.check_leased((row,))
        device = next(iter(self._storage.values())).device
        if device.type == "cpu":
            self.spec.unpack_into(raw, self._storage, row)
        else:
            self.write(row, self.spec.unpack(raw, device))

    def give_back(self) -> None:
        """While no row is leased, the system may have the memory of all of them; leased ones take it again."""
        if not self._leased and not self.poison:
            for pages in self._pages:
                pages.give_back()

    def _map(self, held_as: Mapping[str, torch.dtype]) -> State:
        storage: State = {}
        try:
            for tensor in self.spec.tensors:
                dtype = held_as.get(tensor.name, tensor.dtype)
                self._pages.append(Pages((self.num_rows, *tensor.shape), dtype))
                storage[tensor.name] = self._pages[-1].tensor
        except MemoryError as error:
            raise _no_memory(self.spec, self.num_rows) from error
        return storage

    def _index(self, rows: Sequence[int]) -> Tensor:
        return to_device(np.array(rows, np.int64), next(iter(self._storage.values())).device)

    def check_leased(self, rows: Sequence[int]) -> None:
        """Raises RuntimeError unless there are rows, leased and distinct."""
        if not self._leased.issuperset(rows) or len(set(rows)) != len(rows) or not rows:
            raise RuntimeError(f"rows {list(rows)} must be leased and distinct; leased are {sorted(self._leased)}")

    def _fill_with_poison(self, row: int) -> None:
        for tensor in self._storage.values():
            tensor[row] = float("nan") if tensor.dtype.is_floating_point else POISON_INT


def is_contiguous(rows: Sequence[int]) -> bool:
    """Whether the rows are neighbours in rising order, i.e. a slice of the storage."""
    return all(row == rows[0] + offset for offset, row in enumerate(rows))


def _allocate(spec: StateSpec, num_rows: int, device: torch.device | str, held_as: Mapping[str, torch.dtype]) -> State:
    """Raises MemoryError: torch has no type of its own for a failed allocation, save on GPUs."""
    try:
        return spec.zeros(num_rows, device, held_as)
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        raise _no_memory(spec, num_rows) from error


def _no_memory(spec: StateSpec, num_rows: int) -> MemoryError:
    gib = num_rows * spec.num_bytes / 2**30
    return MemoryError(f"no memory for the states of {num_rows} slots, about {gib:.1f} GiB")
