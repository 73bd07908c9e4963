"""States that stay with the engine between two requests: on its device, and the least recently used in host memory.

A request may leave its end state here instead of taking its bytes along, and another may start from it. Then nothing is
copied to the host, or crosses a process. Whoever left a state may give it a name, under which others find it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable

import torch

from nsm_core.engine.request import NamedState
from nsm_core.state.pool import StatePool
from nsm_core.state.row_copies import RowCopy, StateRows, copy_rows
from nsm_core.state.spec import State

DEVICE_SHARE = 0.25  # of the memory that is free on a GPU when the engine starts
GPU_BLOCK = 64  # rows of one allocation
NUMBER_BITS = 40  # of the random start: numbers of an engine that has ended mean nothing to the next one


@dataclasses.dataclass(slots=True)
class _Row:
    """A row of a block of rows like the pool's."""

    block: StateRows
    index: int


@dataclasses.dataclass(slots=True)
class _Entry:
    """In `row`, or beside a GPU in `on_host`, pinned. `written`: on a GPU, when it has its content. `num_users`:
    those who still need the row; it is free again when none is left and it is dropped.
    """

    row: _Row | None
    on_host: State | None = None
    written: torch.cuda.Event | None = None
    names: set[str] = dataclasses.field(default_factory=set)
    num_users: int = 0
    is_dropped: bool = False


class HeldStart:
    """A held state that a request will start from. It stays where it is until this object is gone."""

    def __init__(self, copy_to: Callable[[int], None], release: Callable[[], None]) -> None:
        """`copy_to`: makes the state the content of a row of the pool."""
        self.copy_to, self._release = copy_to, release

    def __del__(self) -> None:
        self._release()


class HeldStates:
    """Of one engine. The least recently used go when they take more than `max_bytes`, also those with a name.

    `hold`, `HeldStart.copy_to` and `flush` belong to the engine's thread, everything else to any. `flush` makes all
    copies of a step together: until then their rows may have no other use.
    """

    def __init__(self, pool: StatePool, *, max_bytes: int, max_device_bytes: int | None = None) -> None:
        """`pool`: of the running sequences. `max_device_bytes`: what may lie on a GPU beside it; None: DEVICE_SHARE of
        what is free.
        """
        self._pool = pool
        self._device = next(iter(pool.tensors.values())).device
        self._is_gpu = self._device.type == "cuda"
        self._block_rows = GPU_BLOCK if self._is_gpu else 1
        size = pool.spec.num_bytes
        self._max_states = max(1, max_bytes // size)
        if max_device_bytes is None:
            max_device_bytes = int(torch.cuda.mem_get_info(self._device)[0] * DEVICE_SHARE) if self._is_gpu else 0
        self._max_on_device = max(1, max_device_bytes // size)
        self._lock = threading.RLock()  # a HeldStart may go at any moment
        self._entries: OrderedDict[int, _Entry] = OrderedDict()  # the least recently used first
        self._named: dict[str, NamedState] = {}
        self._numbers = itertools.count(secrets.randbits(NUMBER_BITS) << 8)
        self._free: list[_Row] = []
        self._num_on_device = 0
        self._moving: list[tuple[torch.cuda.Event, _Entry, _Row]] = []  # until the host has them
        self._side = torch.cuda.Stream(self._device) if self._is_gpu else None  # type: ignore[no-untyped-call]
        self._copies: list[RowCopy] = []  # that `flush` will make,
        self._unwritten: dict[int, _Entry] = {}  # whose rows get their content by it

    @property
    def num_states(self) -> int:
        return len(self._entries)

    @property
    def num_on_device(self) -> int:
        """Of those, on a GPU."""
        return self._num_on_device

    @torch.inference_mode()
    def hold(self, slot: int) -> int:
        """Keeps a copy of the pool's row, which `flush` makes, and returns its number. Does not wait."""
        if len(self._entries) >= self._max_states:
            self.flush()  # what goes now may be one of this step, and its row the next one's
        with self._lock:
            while len(self._entries) >= self._max_states:
                self._drop(next(iter(self._entries)))
            row = self._take_row()
            entry = _Entry(row)
            number = next(self._numbers)
            self._entries[number] = entry
            self._num_on_device += self._is_gpu
        self._copies.append(RowCopy(row.block, row.index, self._pool.rows, slot))
        self._unwritten[number] = entry
        if self._pool.poison:
            self.flush()  # the slot's row is poisoned when it is free
        return number

    @torch.inference_mode()
    def flush(self) -> None:
        """Makes the copies that `hold` and `HeldStart.copy_to` left to it. Does not wait.

        After an error the states whose copies were left are not here.
        """
        if not self._copies:
            return
        copies, self._copies = self._copies, []
        unwritten, self._unwritten = self._unwritten, {}
        try:
            copy_rows(copies)
        except Exception:
            with self._lock:
                for number in unwritten.keys() & self._entries.keys():
                    self._drop(number)
            raise
        if not unwritten:
            return
        written = self._record()
        with self._lock:
            for entry in unwritten.values():
                entry.written = written
            self._spill()

    def take(self, number: int) -> HeldStart | None:
        """For a request that starts from the state, which stays here; None if it is not here."""
        with self._lock:
            entry = self._use(number)
            if entry is None:
                return None
            self._entries.move_to_end(number)
        return HeldStart(functools.partial(self._copy_to, entry), functools.partial(self._release, entry))

    def pack(self, number: int) -> bytes | None:
        """The state as bytes (`StateSpec.pack`), by a stream of its own; None if it is not here."""
        with self._lock:
            entry = self._use(number)
            if entry is None:
                return None
            row, on_host, written = entry.row, entry.on_host, entry.written
        try:
            if row is None or written is None:
                if written is not None:
                    written.synchronize()
                tensors, index = (row.block.tensors, row.index) if row is not None else (on_host or {}, 0)
                return self._pool.spec.pack(tensors, index)
            stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            stream.wait_event(written)
            with torch.inference_mode(), torch.cuda.stream(stream):
                return self._pool.spec.pack(row.block.tensors, row.index)  # waits for its copy
        finally:
            self._release(entry)

    def name(self, name: str, number: int, about: bytes) -> None:
        """From now on the state is the one of that name; the one before goes, if it has no other name.

        Nothing happens if the state is not here.
        """
        with self._lock:
            if number not in self._entries:
                return
            self._forget(name, but=number)
            self._named[name] = NamedState(number, about)
            self._entries[number].names.add(name)

    def find(self, name: str) -> NamedState | None:
        """The state of that name, which was used just now."""
        with self._lock:
            found = self._named.get(name)
            if found is not None:
                self._entries.move_to_end(found.number)
            return found

    def forget(self, name: str) -> None:
        """The state of that name goes, if it has no other. No error when there is none."""
        with self._lock:
            self._forget(name)

    def drop(self, number: int) -> None:
        """A state without a name goes. No error when it is not here."""
        with self._lock:
            entry = self._entries.get(number)
            if entry is not None and not entry.names:
                self._drop(number)

    def _forget(self, name: str, but: int | None = None) -> None:
        found = self._named.pop(name, None)
        if found is None or found.number == but:
            return
        names = self._entries[found.number].names
        names.discard(name)
        if not names:
            self._drop(found.number)

    def _drop(self, number: int) -> None:
        entry = self._entries.pop(number)
        self._num_on_device -= self._is_gpu and entry.row is not None
        for name in entry.names:
            del self._named[name]
        entry.is_dropped = True
        self._give_back(entry)

    def _use(self, number: int) -> _Entry | None:
        entry = self._entries.get(number)
        if entry is not None:
            entry.num_users += 1
        return entry

    def _release(self, entry: _Entry) -> None:
        with self._lock:
            entry.num_users -= 1
            self._give_back(entry)

    def _give_back(self, entry: _Entry) -> None:
        """Its row may have another content. What was launched on it before runs before what comes."""
        if entry.is_dropped and not entry.num_users and entry.row is not None:
            if self._is_gpu:
                self._free.append(entry.row)
            entry.row = None

    def _take_row(self) -> _Row:
        if not self._free:
            held_as = {name: tensor.dtype for name, tensor in self._pool.tensors.items()}
            block = StateRows(self._pool.spec.zeros(self._block_rows, self._device, held_as))
            self._free = [_Row(block, index) for index in range(self._block_rows)]
        return self._free.pop()

    @torch.inference_mode()
    def _copy_to(self, entry: _Entry, slot: int) -> None:
        if entry.row is not None:  # it was written in this stream
            self._copies.append(RowCopy(self._pool.rows, slot, entry.row.block, entry.row.index))
        elif entry.on_host is not None:
            if entry.written is not None:
                torch.cuda.current_stream(self._device).wait_event(entry.written)
            for name, tensor in self._pool.tensors.items():
                tensor[slot].copy_(entry.on_host[name][0], non_blocking=True)

    def _record(self) -> torch.cuda.Event | None:
        if not self._is_gpu:
            return None
        written = torch.cuda.Event()  # type: ignore[no-untyped-call]
        written.record(torch.cuda.current_stream(self._device))
        return written

    def _spill(self) -> None:
        """Starts copies to pinned memory; nobody waits for them."""
        for moved in [moved for moved in self._moving if moved[0].query()]:  # type: ignore[no-untyped-call]
            self._moving.remove(moved)
            self._free.append(moved[2])
        if self._side is None:
            return
        for entry in self._entries.values():
            if self._num_on_device <= self._max_on_device:
                return
            if entry.row is not None and entry.written is not None and not entry.num_users:
                self._move(entry, entry.row, entry.written, self._side)

    def _move(self, entry: _Entry, row: _Row, written: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
        stream.wait_event(written)
        with torch.inference_mode(), torch.cuda.stream(stream):
            entry.on_host = {
                name: torch.empty((1, *value.shape[1:]), dtype=value.dtype, pin_memory=True).copy_(
                    value[row.index : row.index + 1], non_blocking=True
                )
                for name, value in row.block.tensors.items()
            }
        moved = torch.cuda.Event()  # type: ignore[no-untyped-call]
        moved.record(stream)
        self._moving.append((moved, entry, row))
        entry.row, entry.written = None, moved
        self._num_on_device -= 1
