"""A session as it was at an earlier location of its log: forks begin there."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence

from nsm_core.engine.request import EndState
from nsm_core.state.quantize import StateFormat
from service.backends.base import InferenceBackend
from service.state.at_position import Reading, read_up_to, with_newest
from service.state.copies import SessionCopy
from service.state.log_location import marks_up_to
from service.state.other_model import require_own_model
from service.state.rebuild import sampled_counts, seed_of
from service.state.resume import head_at, resume
from service.stores.sessions.base import LogMark, LogPoint, LogTail, SessionHead, SessionStore, StoredSession
from service.stores.sessions.errors import not_found


async def copy_at(
    backend: InferenceBackend,
    store: SessionStore,
    copy: SessionCopy,
    num_log_tokens: int,
    *,
    request_id: str,
    deadline: float,
    state_format: StateFormat,
) -> SessionCopy:
    """`copy` with the first `num_log_tokens` of its log. The state is made by reading them from the nearest retained
    snapshot; the last of them may wait to be read, as after a rewind. The version is that of the turn it belongs to.

    `deadline`: a `time.monotonic()` reading. Raises NotFound when the session was deleted meanwhile, and what
    `InferenceBackend.submit` raises.
    """
    if num_log_tokens == copy.head.num_log_tokens:
        return copy
    model, tokenizer = backend.model, backend.tokenizer
    await require_own_model(copy.head, model, tokenizer_fingerprint=tokenizer.fingerprint)
    # refuses what this model must not read; the state itself is not used
    stored = StoredSession(head=copy.head, snapshot=copy.snapshot, tail=copy.tail)
    await asyncio.to_thread(resume, stored, model=model, tokenizer=tokenizer)
    marks = marks_up_to(copy.marks, num_log_tokens)
    if not marks:
        return SessionCopy(head=_empty(copy.head), snapshot=None, log_ids=(), marks=())
    log_ids = copy.log_ids[:num_log_tokens]
    end, reading = await _state_after(
        backend, store, copy.head, marks, log_ids, request_id=request_id, deadline=deadline
    )
    end = dataclasses.replace(end, generated_counts=sampled_counts(log_ids, marks))
    before = dataclasses.replace(copy.head, version=marks[-1].version - 1, energy_joules=0.0)
    start = reading.resumed(before, model, tokenizer)
    snapshot = await start.encode_next(end, seed=seed_of(marks), created_at=time.time(), state_format=state_format)
    head = dataclasses.replace(
        copy.head,
        version=marks[-1].version,
        position=end.position,
        num_log_tokens=num_log_tokens,
        snapshot_version=marks[-1].version,
        snapshot_position=end.position,
        snapshot_bytes=len(snapshot),
        model_fingerprint=model.fingerprint,
        tokenizer_fingerprint=tokenizer.fingerprint,
        numerics=model.numerics,
        energy_joules=0.0,
    )
    return SessionCopy(head=head, snapshot=snapshot, log_ids=log_ids, marks=marks)


def _empty(head: SessionHead) -> SessionHead:
    """As before the session's first turn."""
    return dataclasses.replace(
        head,
        version=0,
        position=0,
        num_log_tokens=0,
        snapshot_version=0,
        snapshot_position=0,
        snapshot_bytes=0,
        energy_joules=0.0,
    )


async def _state_after(
    backend: InferenceBackend,
    store: SessionStore,
    head: SessionHead,
    marks: Sequence[LogMark],
    log_ids: tuple[int, ...],
    *,
    request_id: str,
    deadline: float,
) -> tuple[EndState, Reading]:
    """The state at the last of `marks`, whose log is `log_ids`, and how it was read."""
    version = marks[-1].version
    stored = with_newest(await store.list_retained(head.key), head)
    retained = [one for one in stored if one.version <= version]
    if (await store.get(head.key)).created_at != head.created_at:
        raise not_found(head.session_id)
    is_retained = any((one.version, one.position) == (version, len(log_ids)) for one in retained)
    num_fed = len(log_ids) if is_retained or len(log_ids) == 1 else len(log_ids) - 1
    reading = await read_up_to(
        backend,
        store,
        head.key,
        log_ids[:num_fed],
        retained=retained,
        marks=marks,
        request_id=request_id,
        deadline=deadline,
    )
    return reading.end(pending=log_ids[-1] if num_fed < len(log_ids) else None), reading


async def stored_at(store: SessionStore, stored: StoredSession, point: LogPoint) -> StoredSession:
    """`stored` as if the log ended at the end of an earlier version, with the snapshot that it has before that. Raises
    NotFound when the log does not have that end any more.
    """
    head = stored.head
    marks = await store.log_marks(head.key)
    if point not in [LogPoint(mark.version, mark.num_log_tokens) for mark in marks]:
        raise not_found(head.session_id)
    at = head_at(head, point)
    start = at.snapshot_position
    left = tuple(mark for mark in marks if at.snapshot_version < mark.version <= point.version)
    ids = (await store.read_log(head.key, stop=point.num_log_tokens))[start:]
    is_there = at.snapshot_version == head.snapshot_version
    return StoredSession(
        head=at,
        snapshot=stored.snapshot if is_there else None,
        damage=stored.damage if is_there else None,
        tail=LogTail(ids, left),
    )
