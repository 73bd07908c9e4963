"""A session reads text that nobody answers yet: its state is warm when the question comes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import time
from collections.abc import Mapping
from typing import Any

from nsm_core.engine.request import EndState, Finished, GenerationRequest
from nsm_core.errors import EngineDead, NsmError, Overloaded
from nsm_core.sampling.params import SEED_BITS, SamplingParams
from service.backends.base import InferenceBackend
from service.state.keeper import StateKeeper
from service.state.other_model import require_own_model
from service.state.rebuild import read_replay
from service.state.resume import ResumedSession, TurnRequest, require_version, resume, resume_known
from service.stores.sessions.base import Commit, SessionHead, SessionStore
from service.stores.sessions.key import SessionKey
from service.stores.sessions.turn_records import EndedTurn, TurnRecord
from service.tenants.tenants import Tenants
from service.turns.codec import CommitPoint, TurnResult, decode_result, encode_result
from service.turns.follower import head_at
from service.turns.lease import HeldLease
from service.turns.turn import Turn
from service.turns.turns import TurnRegistry, require_same

PROGRESS = "live_input"  # in a record: how far a live body was read


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AppendRequest:
    """`is_verbatim`, `expected_version`, `identity`, `digest`: see TurnRequest. `arrival`, `deadline`:
    `time.monotonic()` readings. `extra`: kept in the record for a retry, as JSON. `replaces`: a turn whose record goes
    when this one begins.
    """

    request_id: str
    key: SessionKey
    input_ids: tuple[int, ...]
    is_verbatim: bool
    expected_version: int | None
    arrival: float
    deadline: float
    identity: str | None = None
    digest: str = ""
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    replaces: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Appended:
    """`mark`: the version before, to which the session can return. `num_tokens`: that were added to its log.

    `is_replay`: an earlier try with the same identity did it.
    """

    head: SessionHead
    mark: int
    num_tokens: int
    is_replay: bool = False


async def append_to_session(
    turns: TurnRegistry, backend: InferenceBackend, store: SessionStore, tenants: Tenants, request: AppendRequest
) -> Appended:
    """Reads and commits; the session is at a new version. A request whose identity was appended before reads nothing,
    and needs no engine.

    Raises the errors of `TurnRegistry.open_turn`, and KeyReused; then nothing has changed.
    """
    try:
        return await _append_or_replay(turns, backend, store, tenants, request)
    except EngineDead:  # it is asked for the session's state before the record is read
        done = await _done_before(store, request)
        if done is None:
            raise
        return done


async def _done_before(store: SessionStore, request: AppendRequest) -> Appended | None:
    """What an earlier try of the whole request committed. Raises KeyReused."""
    if request.identity is None or PROGRESS in request.extra:
        return None
    record = await store.get_turn(request.key, identity=request.identity)
    if record is None or record.status != "committed":
        return None
    require_same(record.digest, request.digest)
    return _appended_before(await store.get(request.key), record)


async def _append_or_replay(
    turns: TurnRegistry, backend: InferenceBackend, store: SessionStore, tenants: Tenants, request: AppendRequest
) -> Appended:
    async with turns.exclusive(request.key, is_hot=True) as (turn, held):
        if request.identity is None:
            return await _append(turns.keeper, backend, store, tenants, request, turn, held, turn_id=None, ttl_s=0.0)
        if PROGRESS in request.extra:  # a record of the same identity may be that of an earlier part
            require_version(held.stored.head, request.expected_version)
        if request.replaces is not None:
            await held.forget_turn(request.replaces)
        record, turn_id = await turns.begin_record(held, _as_turn(request)), request.request_id
        if record is not None:
            require_same(record.digest, request.digest)
            if record.status == "committed":
                return _appended_before(held.stored.head, record)
            turn_id = record.turn_id  # an earlier try whose process was lost is done again, under its own record
        try:
            ttl_s = turns.record_ttl_s
            return await _append(
                turns.keeper, backend, store, tenants, request, turn, held, turn_id=turn_id, ttl_s=ttl_s
            )
        except BaseException:
            with contextlib.suppress(NsmError):
                await held.forget_turn(turn_id)
            raise


async def _append(
    keeper: StateKeeper,
    backend: InferenceBackend,
    store: SessionStore,
    tenants: Tenants,
    request: AppendRequest,
    turn: Turn,
    held: HeldLease,
    *,
    turn_id: str | None,
    ttl_s: float,
) -> Appended:
    """`turn_id`: of the record that keeps the result for a retry, for `ttl_s` seconds; None: nothing is kept."""
    head = held.stored.head
    require_version(head, request.expected_version)
    await tenants.check_stored_bytes(request.key.tenant)
    start = await _resume(backend, store, held)
    asked = start.generation_request(_as_turn(request))
    try:
        finished, end = await _read(backend, turn, asked)
    except (EngineDead, Overloaded):
        if not start.is_held:
            raise
        backend.require_room()  # of another engine: the one with the state is full, or has lost it
        await held.start_without(keeper.bytes_of)
        start = await _resume(backend, store, held)
        asked = start.generation_request(_as_turn(request))
        finished, end = await _read(backend, turn, asked)
    new_ids = start.new_log_ids(end)
    snapshot = start.next_snapshot(
        end, seed=asked.sampling.seed, created_at=time.time(), state_format=held.state_format
    )
    is_due = keeper.is_due_with(start)
    commit = Commit(
        expected_version=head.version,
        snapshot=await asyncio.to_thread(snapshot.encode) if is_due else None,
        position=end.position,
        model_fingerprint=backend.model.fingerprint,
        new_ids=new_ids,
        num_sampled=0,
        seed=asked.sampling.seed,
        turn=None if turn_id is None else _ended(turn_id, request, asked, finished, start, end, new_ids, ttl_s),
        tokenizer_fingerprint=backend.tokenizer.fingerprint,
        numerics=backend.model.numerics,
        energy_joules=start.energy_joules,
    )
    committed = await held.commit(commit)
    keeper.committed(committed, snapshot, num_replayed=start.num_replayed, finished=finished)
    return Appended(committed, head.version, len(new_ids))


def _ended(
    turn_id: str,
    request: AppendRequest,
    asked: GenerationRequest,
    finished: Finished,
    start: ResumedSession,
    end: EndState,
    new_ids: tuple[int, ...],
    ttl_s: float,
) -> EndedTurn:
    head = start.head
    result = TurnResult(
        sampling=asked.sampling,
        render_options={"num_appended": len(new_ids), **request.extra},
        tokens=(),
        finished=finished,
        commit_point=CommitPoint(
            version=head.version + 1, position=end.position, num_log_tokens=head.num_log_tokens + len(new_ids)
        ),
        rebuilt=start.rebuilt,
        other_numerics=start.other_numerics,
    )
    return EndedTurn(turn_id=turn_id, result=encode_result(result), ttl_s=ttl_s)


def _appended_before(head: SessionHead, record: TurnRecord) -> Appended:
    """What the first try was told, whatever the session has read since."""
    result = decode_result(record.result or b"")
    if result.commit_point is None:
        raise RuntimeError("a committed turn has no end")
    there = head_at(head, result.commit_point)
    return Appended(there, there.version - 1, result.render_options["num_appended"], is_replay=True)


def progress_of(record: TurnRecord) -> dict[str, Any]:
    """What a commit of a live body tells, with its version and the number of tokens that are read by its end."""
    result = decode_result(record.result or b"")
    if result.commit_point is None:
        raise RuntimeError("a committed turn has no end")
    known, num_new = result.render_options[PROGRESS], result.render_options["num_appended"]
    return {**known, "version": result.commit_point.version, "num_tokens": known["num_tokens"] + num_new}


async def _resume(backend: InferenceBackend, store: SessionStore, held: HeldLease) -> ResumedSession:
    """The session's state, or its log to be read again."""
    model, tokenizer, head = backend.model, backend.tokenizer, held.stored.head
    await require_own_model(head, model, tokenizer_fingerprint=tokenizer.fingerprint)
    if held.hot is not None:
        return resume_known(head, held.hot, model=model, tokenizer=tokenizer)
    found = await asyncio.to_thread(resume, held.stored, model=model, tokenizer=tokenizer)
    if isinstance(found, ResumedSession):
        return found
    replay = await read_replay(store, found, head)
    return ResumedSession(head=head, snapshot=None, model=model, tokenizer=tokenizer, replay=replay)


def _as_turn(request: AppendRequest) -> TurnRequest:
    """A request samples at least one token: this one is never read, and nobody sees it."""
    seed = secrets.randbits(SEED_BITS)  # of a session that has none yet
    return TurnRequest(
        request_id=request.request_id,
        key=request.key,
        input_ids=request.input_ids,
        is_verbatim=request.is_verbatim,
        sampling=SamplingParams(max_tokens=1, temperature=0.0, seed=seed, ignore_eos=True),
        has_own_seed=False,
        arrival=request.arrival,
        expected_version=request.expected_version,
        deadline=request.deadline,
        identity=request.identity,
        digest=request.digest,
    )


async def _read(backend: InferenceBackend, turn: Turn, asked: GenerationRequest) -> tuple[Finished, EndState]:
    """How the reading ended, and the state after the prompt."""
    generation = backend.submit(asked)
    turn.attach(generation)
    finished: Finished | None = None
    try:
        async for event in generation.events():
            finished = event if isinstance(event, Finished) else finished
    except BaseException:
        generation.cancel()
        raise
    if finished is None:
        raise RuntimeError("the engine ended a request without Finished")
    error = turn.error_of(finished)
    if error is not None:
        raise error
    if finished.end_state is None:
        raise RuntimeError("the engine ended a session's request without its state")
    return finished, _without_sampled(finished.end_state, num_read=len(asked.prompt_ids))


def _without_sampled(end: EndState, *, num_read: int) -> EndState:
    counts = dict(end.generated_counts)
    for token_id in end.new_ids[num_read:]:
        counts[token_id] -= 1
    counts = {token_id: count for token_id, count in counts.items() if count}
    return dataclasses.replace(end, pending=None, new_ids=end.new_ids[:num_read], generated_counts=counts)
