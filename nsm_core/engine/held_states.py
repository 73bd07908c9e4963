"""States that stay with the engine between two requests: on its device, and the least recently used in host memory.

A request may leave its end state here instead of taking its bytes along, and another may start from it. Then nothing is
copied to the host, or crosses a process. Whoever left a state may give it a name, under which others find it.
"""

from __future__ import annotations

import dataclasses
import itertools
import secrets
import threading
from collections import OrderedDict

import torch

from nsm_core.engine.request import NamedState
from nsm_core.state.spec import State, StateSpec

DEVICE_SHARE = 0.25  # of the memory that is free on a GPU when the engine starts
NUMBER_BITS = 40  # of the random start: numbers of an engine that has ended mean nothing to the next one


@dataclasses.dataclass(slots=True)
class _Entry:
    """`state` [1, *shape]; `written`: on a GPU, when it has its content."""

    state: State
    is_on_device: bool
    written: torch.cuda.Event | None = None
    names: set[str] = dataclasses.field(default_factory=set)


class HeldStates:
    """Of one engine. The least recently used go when they take more than `max_bytes`, also those with a name.

    `hold` and `take` belong to the engine's thread, everything else to any.
    """

    def __init__(self, spec: StateSpec, device: torch.device, *, max_bytes: int, max_device_bytes: int | None = None):
        """`max_device_bytes`: what may lie on a GPU; None: DEVICE_SHARE of what is free."""
        self._spec, self._device = spec, device
        self._is_gpu = device.type == "cuda"
        self._max_states = max(1, max_bytes // spec.num_bytes)
        if max_device_bytes is None:
            max_device_bytes = int(torch.cuda.mem_get_info(device)[0] * DEVICE_SHARE) if self._is_gpu else 0
        self._max_on_device = max(1, max_device_bytes // spec.num_bytes)
        self._lock = threading.Lock()
        self._entries: OrderedDict[int, _Entry] = OrderedDict()  # the least recently used first
        self._named: dict[str, NamedState] = {}
        self._numbers = itertools.count(secrets.randbits(NUMBER_BITS) << 8)
        self._num_on_device = 0
        self._moving: list[tuple[torch.cuda.Event, State]] = []  # device copies, until the host has them
        self._side = torch.cuda.Stream(device) if self._is_gpu else None  # type: ignore[no-untyped-call]

    @property
    def num_states(self) -> int:
        return len(self._entries)

    @property
    def num_on_device(self) -> int:
        """Of those, on a GPU."""
        return self._num_on_device

    def hold(self, state: State) -> int:
        """Keeps `state` [1, *shape], which nobody else will change, and returns its number."""
        written = self._record()
        with self._lock:
            number = next(self._numbers)
            self._entries[number] = _Entry(state, self._is_gpu, written)
            self._num_on_device += self._is_gpu
            while len(self._entries) > self._max_states:
                self._drop(next(iter(self._entries)))
            self._spill()
        return number

    def take(self, number: int) -> State | None:
        """The state, which stays here, for work on the current stream; None if it is not here."""
        with self._lock:
            entry = self._entries.get(number)
            if entry is None:
                return None
            self._entries.move_to_end(number)
        if entry.written is None:
            return entry.state
        torch.cuda.current_stream(self._device).wait_event(entry.written)
        if entry.is_on_device:
            return entry.state
        return {name: value.to(self._device, non_blocking=True) for name, value in entry.state.items()}

    def pack(self, number: int) -> bytes | None:
        """The state as bytes (`StateSpec.pack`), by a stream of its own; None if it is not here."""
        with self._lock:
            entry = self._entries.get(number)
        if entry is None:
            return None
        if entry.written is None:
            return self._spec.pack(entry.state)
        if not entry.is_on_device:
            entry.written.synchronize()
            return self._spec.pack(entry.state)
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_event(entry.written)
        with torch.inference_mode(), torch.cuda.stream(stream):
            return self._spec.pack(entry.state)  # waits for its copy: the entry's memory is not given back before

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
        self._num_on_device -= entry.is_on_device
        for name in entry.names:
            del self._named[name]

    def _record(self) -> torch.cuda.Event | None:
        if not self._is_gpu:
            return None
        written = torch.cuda.Event()  # type: ignore[no-untyped-call]
        written.record(torch.cuda.current_stream(self._device))
        return written

    def _spill(self) -> None:
        """Starts copies to pinned memory; nobody waits for them."""
        self._moving = [moving for moving in self._moving if not moving[0].query()]  # type: ignore[no-untyped-call]
        if self._side is None or self._num_on_device <= self._max_on_device:
            return
        for entry in self._entries.values():
            if entry.is_on_device and entry.written is not None:
                self._move(entry, entry.written, self._side)
                if self._num_on_device <= self._max_on_device:
                    return

    def _move(self, entry: _Entry, written: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
        stream.wait_event(written)
        with torch.inference_mode(), torch.cuda.stream(stream):
            there = {
                name: torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
                for name, value in entry.state.items()
            }
        moved = torch.cuda.Event()  # type: ignore[no-untyped-call]
        moved.record(stream)
        self._moving.append((moved, entry.state))
        entry.state, entry.written, entry.is_on_device = there, moved, False
        self._num_on_device -= 1
