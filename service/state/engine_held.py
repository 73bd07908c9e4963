"""States of sessions that the engine holds: what another gateway of the same engine needs to go on from one."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from nsm_core.state.snapshot import Snapshot, SnapshotHeader
from service.backends.base import InferenceBackend, holder_of
from service.state.hot_states import HotState
from service.stores.sessions.base import SessionHead
from service.stores.sessions.key import SessionKey


class _About(msgspec.Struct, array_like=True):
    """The head after the commit of that state's version, and the header of its snapshot."""

    head: SessionHead
    header: SnapshotHeader


def _encode_other(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} cannot be told")


_encoder, _decoder = msgspec.msgpack.Encoder(enc_hook=_encode_other), msgspec.msgpack.Decoder(_About)


class EngineHeld:
    """The states of sessions in the backend's engine. Nothing is there if it holds none."""

    def __init__(self, backend: InferenceBackend) -> None:
        self._backend = backend

    @property
    def is_used(self) -> bool:
        """Whether turns leave their states with the engine. Known once the backend has started."""
        holder = holder_of(self._backend)
        return holder is not None and holder.holds_states

    async def find(self, key: SessionKey, *, now: float) -> HotState | None:
        """The state that any gateway of the engine left last for the session. `now`: a `time.monotonic()` reading."""
        holder = holder_of(self._backend)
        if holder is None:
            return None
        found = await holder.find_state(_name(key))
        if found is None:
            return None
        about = _decoder.decode(found.about)
        return HotState(about.head, Snapshot(about.header, b"", held=found.number), now)

    async def fetch(self, snapshot: Snapshot) -> Snapshot | None:
        """The same with its bytes; None if the engine does not hold it any more."""
        if snapshot.held is None:
            return snapshot
        holder = holder_of(self._backend)
        if holder is None:
            return None
        state = await holder.fetch_state(snapshot.held)
        return None if state is None else Snapshot(snapshot.header, state)

    def put(self, hot: HotState) -> None:
        """The session's newest state, if the engine holds it; otherwise it has none there from now on."""
        holder = holder_of(self._backend)
        if holder is None or not holder.holds_states:
            return
        if hot.snapshot.held is None:
            self.forget(hot.head.key)
        else:
            about = _encoder.encode(_About(hot.head, hot.snapshot.header))
            holder.name_state(_name(hot.head.key), hot.snapshot.held, about)

    def forget(self, key: SessionKey) -> None:
        holder = holder_of(self._backend)
        if holder is not None and holder.holds_states:
            holder.forget_state(_name(key))


def _name(key: SessionKey) -> str:
    return f"{key.tenant}/{key.session_id}"
