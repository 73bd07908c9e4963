"""The state after the first tokens of a session's log: from the nearest retained snapshot, and the rest read.

A retained snapshot only saves reading. One that is gone, damaged, another session's or another model's is skipped: the
one before it is tried, and at last the start of the log.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterable

from nsm_core.engine.request import EndState, Finished, FinishReason, Resume
from nsm_core.errors import NsmError, SnapshotCorrupt
from nsm_core.model_info import ModelInfo
from nsm_core.state.plausible import implausible_tensor
from nsm_core.state.quantize import StateFormat
from nsm_core.state.snapshot import Snapshot
from nsm_core.tokenizer import Tokenizer
from service.backends.base import Generation, InferenceBackend
from service.state.prefill import read_again
from service.state.resume import ResumedSession
from service.stores.sessions.base import LogMark, SessionHead, SessionStore
from service.stores.sessions.key import SessionKey
from service.stores.sessions.retention import RetainedSnapshot


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """How the reading ended, with the state; `rounding`, `earlier_numerics`: see ResumedSession."""

    finished: Finished
    rounding: StateFormat
    earlier_numerics: tuple[str, ...]

    def end(self, *, pending: int | None) -> EndState:
        """The state before `pending`. Raises why there is none."""
        found = self.finished.end_state
        if found is None:
            raise self.finished.error or NsmError("the session's log could not be read again")
        return EndState(state=found.state, position=found.position, pending=pending, new_ids=(), generated_counts={})

    def resumed(self, head: SessionHead, model: ModelInfo, tokenizer: Tokenizer) -> ResumedSession:
        """The session of `head` at the state that was read, to encode its next snapshot from."""
        return ResumedSession(
            head=head,
            snapshot=None,
            model=model,
            tokenizer=tokenizer,
            rounding=self.rounding,
            earlier_numerics=self.earlier_numerics,
        )


async def read_up_to(
    backend: InferenceBackend,
    store: SessionStore,
    key: SessionKey,
    ids: tuple[int, ...],
    *,
    retained: Iterable[RetainedSnapshot],
    marks: Iterable[LogMark],
    request_id: str,
    deadline: float,
    on_start: Callable[[Generation], None] = lambda generation: None,
) -> Reading:
    """`read_again` of `ids`, the first of the session's log (at least one), less what a retained snapshot has read.

    `marks`: of that log, read with it. A retained snapshot must be at one of them: then it is of this log, and not of
    one that the session had before a rewind.

    `cached_tokens` of the result are the tokens that it spared.
    """
    ends = {mark.version: mark.num_log_tokens for mark in marks}
    own = [one for one in retained if ends.get(one.version, -1) - one.position in (0, 1)]  # 1: a pending token
    nearest = await _nearest(backend, store, key, len(ids), retained=own)
    start = None if nearest is None else _resume(nearest)
    rounding = StateFormat.FP32 if nearest is None else nearest.header.rounding
    earlier_numerics = () if nearest is None else nearest.header.earlier_numerics
    if start is not None and start.position == len(ids):
        end = EndState(state=start.state, position=len(ids), pending=None, new_ids=(), generated_counts={})
        finished = Finished(reason=FinishReason.LENGTH, prompt_tokens=len(ids), cached_tokens=len(ids), end_state=end)
        return Reading(finished, rounding, earlier_numerics)
    finished = await read_again(backend, ids, request_id=request_id, deadline=deadline, on_start=on_start, resume=start)
    return Reading(finished, rounding, earlier_numerics)


def with_newest(retained: Iterable[RetainedSnapshot], head: SessionHead) -> tuple[RetainedSnapshot, ...]:
    """All stored snapshots of a session: a position may lie between the newest and the head."""
    newest = head.newest_snapshot
    return tuple(retained) if newest is None else (*retained, newest)


async def _nearest(
    backend: InferenceBackend,
    store: SessionStore,
    key: SessionKey,
    num_tokens: int,
    *,
    retained: Iterable[RetainedSnapshot],
) -> Snapshot | None:
    for one in sorted(retained, key=lambda snapshot: snapshot.position, reverse=True):
        if one.position > num_tokens:
            continue
        raw = await store.load_retained(key, version=one.version)
        expected = (*key, one.version, one.position)
        found = None if raw is None else await asyncio.to_thread(_decode, backend, raw, expected)
        if found is not None:
            return found
    return None


def _decode(backend: InferenceBackend, raw: bytes, expected: tuple[str, str, int, int]) -> Snapshot | None:
    """None unless it is the expected (tenant, session, version, position), made by the running model as it runs."""
    try:
        snapshot = Snapshot.decode(raw, is_verified=True)  # by the store
    except SnapshotCorrupt:
        return None
    header, model = snapshot.header, backend.model
    is_own = (header.tenant, header.session_id, header.version, header.position) == expected
    is_of_model = (header.model_fingerprint, header.numerics) == (model.fingerprint, model.numerics)
    is_usable = is_own and is_of_model and header.layout == model.state_layout
    return snapshot if is_usable and implausible_tensor(header.layout, snapshot.state) is None else None


def _resume(snapshot: Snapshot) -> Resume:
    header = snapshot.header
    return Resume(
        state=snapshot.state, position=header.position, fingerprint=header.model_fingerprint, generated_counts={}
    )
