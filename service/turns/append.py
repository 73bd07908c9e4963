"""A session reads text that nobody answers yet: its state is warm when the question comes."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time

from nsm_core.engine.request import EndState, Finished, GenerationRequest
from nsm_core.sampling.params import SEED_BITS, SamplingParams
from service.backends.base import InferenceBackend
from service.state.rebuild import read_replay
from service.state.resume import ResumedSession, TurnRequest, require_version, resume
from service.stores.sessions.base import Commit, SessionHead, SessionStore
from service.stores.sessions.key import SessionKey
from service.tenants.tenants import Tenants
from service.turns.lease import HeldLease
from service.turns.turn import Turn
from service.turns.turns import TurnRegistry


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AppendRequest:
    """`is_verbatim`, `expected_version`: see TurnRequest. `arrival`, `deadline`: `time.monotonic()` readings."""

    request_id: str
    key: SessionKey
    input_ids: tuple[int, ...]
    is_verbatim: bool
    expected_version: int | None
    arrival: float
    deadline: float


@dataclasses.dataclass(frozen=True, slots=True)
class Appended:
    """`mark`: the version before, to which the session can return. `num_tokens`: that were added to its log."""

    head: SessionHead
    mark: int
    num_tokens: int


async def append_to_session(
    turns: TurnRegistry, backend: InferenceBackend, store: SessionStore, tenants: Tenants, request: AppendRequest
) -> Appended:
    """Reads and commits; the session is at a new version.

    Raises the errors of `TurnRegistry.open_turn`; then nothing has changed.
    """
    async with turns.exclusive(request.key) as (turn, held):
        head = held.stored.head
        require_version(head, request.expected_version)
        await tenants.check_stored_bytes(request.key.tenant)
        start = await _resume(backend, store, held)
        asked = start.generation_request(_as_turn(request))
        end = await _read(backend, turn, asked)
        new_ids = start.new_log_ids(end)
        snapshot = await start.encode_next(
            end, seed=asked.sampling.seed, created_at=time.time(), state_format=held.state_format
        )
        commit = Commit(
            expected_version=head.version,
            snapshot=snapshot,
            position=end.position,
            model_fingerprint=backend.model.fingerprint,
            new_ids=new_ids,
            num_sampled=0,
            seed=asked.sampling.seed,
            tokenizer_fingerprint=backend.tokenizer.fingerprint,
            numerics=backend.model.numerics,
            energy_joules=start.energy_joules,
        )
        return Appended(await held.commit(commit), head.version, len(new_ids))


async def _resume(backend: InferenceBackend, store: SessionStore, held: HeldLease) -> ResumedSession:
    """The session's state, or its log to be read again."""
    model, tokenizer, head = backend.model, backend.tokenizer, held.stored.head
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
        deadline=request.deadline,
    )


async def _read(backend: InferenceBackend, turn: Turn, asked: GenerationRequest) -> EndState:
    """The state after the prompt."""
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
    return _without_sampled(finished.end_state, num_read=len(asked.prompt_ids))


def _without_sampled(end: EndState, *, num_read: int) -> EndState:
    counts = dict(end.generated_counts)
    for token_id in end.new_ids[num_read:]:
        counts[token_id] -= 1
    counts = {token_id: count for token_id, count in counts.items() if count}
    return dataclasses.replace(end, pending=None, new_ids=end.new_ids[:num_read], generated_counts=counts)
