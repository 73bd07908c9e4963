"""A session goes back to an earlier token of its log, as if it had never gone on from there."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence

from nsm_core.engine.request import EndState
from service.backends.base import InferenceBackend
from service.state.at_position import Reading, read_up_to, with_newest
from service.state.log_location import LogLocation, marks_up_to
from service.state.other_model import require_own_model
from service.state.rebuild import sampled_counts, seed_of
from service.state.resume import require_version, resume
from service.stores.sessions.base import LogMark, Rewind, SessionHead, SessionStore
from service.stores.sessions.key import SessionKey
from service.turns.lease import HeldLease
from service.turns.turn import Turn
from service.turns.turns import TurnRegistry


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RewindRequest:
    """`deadline`: a `time.monotonic()` reading, for the reading of the log."""

    request_id: str
    key: SessionKey
    location: LogLocation
    expected_version: int | None
    deadline: float


async def rewind_session(
    turns: TurnRegistry, backend: InferenceBackend, store: SessionStore, request: RewindRequest
) -> SessionHead:
    """The head after the rewind, at a new version. The state is made by reading the rest of the log, from the nearest
    older snapshot that is kept.

    The last token that stays is pending and not fed, whether it was sampled or read. So the next turn may bring more
    input, or none, and equals the turn of a session that never went further. A log of one token is fed: a state stands
    on at least one token.

    Raises the errors of `TurnRegistry.open_turn`; then nothing has changed.
    """
    async with turns.exclusive(request.key) as (turn, held):
        head = held.stored.head
        model, tokenizer = backend.model, backend.tokenizer
        require_version(head, request.expected_version)
        await require_own_model(head, model, tokenizer_fingerprint=tokenizer.fingerprint)
        # refuses a log that this model must not read; the state itself is not used
        await asyncio.to_thread(resume, held.stored, model=model, tokenizer=tokenizer)
        marks = await store.log_marks(request.key)
        num_log_tokens = request.location.num_log_tokens(head, marks)
        log_ids = await store.read_log(request.key, stop=num_log_tokens)
        staying = marks_up_to(marks, num_log_tokens)
        is_turn_cut = len(staying) > 0 and staying[-1] not in marks
        snapshot, seed, position = None, None, 0
        if log_ids:
            end, reading = await _state_after(backend, store, log_ids, marks, request, turn, held)
            end = dataclasses.replace(end, generated_counts=sampled_counts(log_ids, marks))
            seed, position = seed_of(staying), end.position
            before = dataclasses.replace(head, energy_joules=0.0)  # that of the turns that are cut off is not known
            start = reading.resumed(before, model, tokenizer)
            snapshot = await start.encode_next(end, seed=seed, created_at=time.time(), state_format=held.state_format)
        rewind = Rewind(
            expected_version=head.version,
            snapshot=snapshot,
            position=position,
            model_fingerprint=model.fingerprint,
            num_log_tokens=num_log_tokens,
            num_sampled=staying[-1].num_sampled if is_turn_cut else 0,
            seed=seed,
            tokenizer_fingerprint=tokenizer.fingerprint,
            numerics=model.numerics,
        )
        return await held.rewind(rewind)


async def _state_after(
    backend: InferenceBackend,
    store: SessionStore,
    log_ids: tuple[int, ...],
    marks: Sequence[LogMark],
    request: RewindRequest,
    turn: Turn,
    held: HeldLease,
) -> tuple[EndState, Reading]:
    """The state with its pending token, and how it was read."""
    fed, pending = (log_ids[:-1], log_ids[-1]) if len(log_ids) > 1 else (log_ids, None)
    reading = await read_up_to(
        backend,
        store,
        request.key,
        fed,
        retained=with_newest(held.retained, held.stored.head),
        marks=marks,
        request_id=request.request_id,
        deadline=request.deadline,
        on_start=turn.attach,
    )
    error = turn.error_of(reading.finished)
    if error is not None:
        raise error
    return reading.end(pending=pending), reading
