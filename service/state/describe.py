"""The use of a session's state, from its stored snapshot; on request also the effect of its last tokens."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import Any, Protocol

from nsm_core.errors import InvalidRequest, SnapshotCorrupt, StateMismatch
from nsm_core.model_info import ModelInfo
from nsm_core.state.report import Detail, StateReport
from nsm_core.tokenizer import Tokenizer
from service.backends.base import InferenceBackend
from service.state.at_head import with_head_state
from service.state.keeper import StateKeeper
from service.state.other_model import other_model
from service.state.rebuild import LostState
from service.state.recent_text import recent_text
from service.state.resume import ResumedSession, resume
from service.stores.sessions.base import SessionHead, SessionStore, StoredSession
from service.stores.sessions.key import SessionKey


class StateSource(Protocol):
    """The part of a backend that describes stored states; it needs no engine."""

    @property
    def model(self) -> ModelInfo: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    async def inspect_state(
        self, state: bytes | None, *, detail: Detail = Detail.LAYER, layer: int | None = None
    ) -> StateReport: ...


async def describe_states(
    backend: InferenceBackend,
    store: SessionStore,
    keeper: StateKeeper,
    key: SessionKey,
    *,
    detail: Detail = Detail.LAYER,
    layer: int | None = None,
    num_recent: int = 0,
    has_tokens: bool = False,
    timeout_s: float = 60.0,
) -> dict[str, Any]:
    """The answer as JSON values. A session without a state shows the learned start, at position 0.

    `num_recent`: so many of its last tokens are read again, in at most `timeout_s`, to report their routing, with
    `has_tokens` of each token too. Otherwise no step of the model is made, unless the
    newest state is neither here nor stored.

    Raises NotFound, InvalidRequest, SnapshotCorrupt, or StateMismatch for another model's state.
    """
    deadline = time.monotonic() + timeout_s
    loaded = await store.load(key)
    stored = await with_head_state(backend, keeper, loaded, deadline=deadline)
    answer = await describe_stored(backend, stored, detail=detail, layer=layer)
    if num_recent:
        answer["recent"] = await _recent(
            backend, store, loaded.head, num_recent, has_tokens=has_tokens, timeout_s=timeout_s
        )
    return answer


async def describe_stored(
    source: StateSource, stored: StoredSession, *, detail: Detail, layer: int | None
) -> dict[str, Any]:
    """The same of a loaded session's newest stored state, without `recent`. Raises as `describe_states` does, but for
    NotFound; InvalidRequest also for a session that has a log and no stored state.
    """
    found = resume(stored, model=source.model, tokenizer=source.tokenizer)
    start = await _usable(found, stored.head, running=source.model.fingerprint)
    if start.is_cold:
        raise InvalidRequest(f"no state of session {stored.head.session_id!r} is stored; a running server can make it")
    snapshot = start.snapshot
    raw = None if snapshot is None else snapshot.state
    report = await source.inspect_state(raw, detail=detail, layer=layer)
    return {
        "object": "session.states",
        "session_id": stored.head.session_id,
        "version": 0 if snapshot is None else snapshot.header.version,
        "model_fingerprint": source.model.fingerprint,
        "numerics": source.model.numerics if snapshot is None else snapshot.header.numerics,
        "dtype": None if snapshot is None else snapshot.header.stored_dtype,
        "rounded_to": None if snapshot is None else snapshot.header.rounded_to,
        "position": report.position,
        "state_bytes": report.num_bytes,
        "detail": detail.value,
        "layers": [_without_unset(dataclasses.asdict(use)) for use in report.layers],
    }


async def _recent(
    backend: InferenceBackend,
    store: SessionStore,
    head: SessionHead,
    num_tokens: int,
    *,
    has_tokens: bool,
    timeout_s: float,
) -> dict[str, Any]:
    text = await recent_text(backend, store, head, num_tokens=num_tokens, timeout_s=timeout_s)
    layers = await backend.inspect_text(text.state, text.ids, has_tokens=has_tokens) if text.ids else ()
    described = [dataclasses.asdict(layer) for layer in layers]
    routed = [layer.pop("tokens") for layer in described]
    recent = {"position": text.position, "num_tokens": len(text.ids), "layers": described}
    if has_tokens:
        recent["tokens"] = [
            {"token_id": token_id, "position": text.position + index, "layers": [layer[index] for layer in routed]}
            for index, token_id in enumerate(text.ids)
        ]
    return recent


async def _usable(found: ResumedSession | LostState, head: SessionHead, *, running: str) -> ResumedSession:
    """Raises for a state that the next turn would rebuild: until then nothing can be inspected. `running`: the
    fingerprint of the model that is served.
    """
    if isinstance(found, ResumedSession):
        return found
    if found.reason == "fingerprint_mismatch":
        made_by, ways = await asyncio.to_thread(other_model, head.model_fingerprint, running)
        raise StateMismatch(
            f"the state of session {head.session_id!r} was made by model {made_by}, which is not served here: {ways}"
        )
    raise SnapshotCorrupt(f"the state of session {head.session_id!r} is {found.reason}; its next turn makes it again")


def _without_unset(layer: dict[str, Any]) -> dict[str, Any]:
    """A layer with the fields of its kind and detail; figures that are not defined stay, as null."""
    shown = {name: value for name, value in layer.items() if value is not None}
    for use in (shown.get("use"), *shown.get("heads", ())):
        if use is not None and use["slots"] is None:
            del use["slots"]
    return shown
