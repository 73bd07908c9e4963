"""A session goes back to an earlier token of its log, as if it had never gone on from there."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence

from nsm_core.engine.request import EndState
from nsm_core.errors import InvalidRequest
from nsm_core.state.quantize import StateFormat
from service.backends.base import InferenceBackend
from service.state.at_position import read_up_to
from service.state.rebuild import sampled_counts, seed_of
from service.state.resume import ResumedSession, require_version, resume
from service.stores.sessions.base import LogMark, Rewind, SessionHead, SessionStore
from service.stores.sessions.key import SessionKey
from service.turns.lease import HeldLease
from service.turns.turn import Turn
from service.turns.turns import TurnRegistry

MAX_SHOWN_VERSIONS = 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RewindRequest:
    """Exactly one of `to_version`, the end of that turn, and `to_position`, so many tokens of the log, is not None.

    `deadline`: a `time.monotonic()` reading, for the reading of the log.
    """

    request_id: str
    key: SessionKey
    to_version: int | None
    to_position: int | None
    expected_version: int | None
    deadline: float

    def num_log_tokens(self, head: SessionHead, marks: Sequence[LogMark]) -> int:
        """How much of the log stays. Raises InvalidRequest."""
        if self.to_position is not None:
            if not 0 <= self.to_position <= head.num_log_tokens:
                raise InvalidRequest(
                    f"to_position must be in [0, {head.num_log_tokens}], got {self.to_position}", param="to_position"
                )
            return self.to_position
        ends = {0: 0} | {mark.version: mark.num_log_tokens for mark in marks}
        if self.to_version not in ends:
            last = ", ".join(str(version) for version in list(ends)[-MAX_SHOWN_VERSIONS:])
            raise InvalidRequest(
                f"to_version must be a version that the session's log still has (the last are {last}), "
                f"got {self.to_version}",
                param="to_version",
            )
        return ends[self.to_version]


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
        # refuses a log that this model must not read; the state itself is not used
        await asyncio.to_thread(resume, held.stored, model=model, tokenizer=tokenizer)
        marks = await store.log_marks(request.key)
        num_log_tokens = request.num_log_tokens(head, marks)
        log_ids = await store.read_log(request.key, stop=num_log_tokens)
        snapshot, seed, position = None, None, 0
        if log_ids:
            end, rounding = await _state_after(backend, store, log_ids, marks, request, turn, held)
            end = dataclasses.replace(end, generated_counts=sampled_counts(log_ids, marks))
            seed, position = _seed_at(marks, num_log_tokens), end.position
            start = ResumedSession(head=head, snapshot=None, model=model, tokenizer=tokenizer, rounding=rounding)
            snapshot = await start.encode_next(end, seed=seed, created_at=time.time(), state_format=held.state_format)
        rewind = Rewind(
            expected_version=head.version,
            snapshot=snapshot,
            position=position,
            model_fingerprint=model.fingerprint,
            num_log_tokens=num_log_tokens,
            num_sampled=_num_sampled_since_mark(marks, num_log_tokens),
            seed=seed,
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
) -> tuple[EndState, StateFormat]:
    """The state with its pending token, and its `rounding`."""
    fed, pending = (log_ids[:-1], log_ids[-1]) if len(log_ids) > 1 else (log_ids, None)
    reading = await read_up_to(
        backend,
        store,
        request.key,
        fed,
        retained=held.retained,
        marks=marks,
        request_id=request.request_id,
        deadline=request.deadline,
        on_start=turn.attach,
    )
    finished = reading.finished
    error = turn.error_of(finished)
    if error is not None:
        raise error
    if finished.end_state is None:
        raise RuntimeError("the engine ended a session's request without its state")
    state = finished.end_state.state
    end = EndState(state=state, position=len(fed), pending=pending, new_ids=(), generated_counts={})
    return end, reading.rounding


def _seed_at(marks: Sequence[LogMark], num_log_tokens: int) -> int:
    """The seed of the turn that the last token belongs to."""
    index = next((i for i, mark in enumerate(marks) if mark.num_log_tokens >= num_log_tokens), len(marks))
    return seed_of(marks[: index + 1])


def _num_sampled_since_mark(marks: Sequence[LogMark], num_log_tokens: int) -> int:
    """How many of the last tokens that stay, after the last mark that stays, were sampled."""
    cut = next((mark for mark in marks if mark.num_log_tokens > num_log_tokens), None)
    if cut is None:
        return 0
    last_whole = max((mark.num_log_tokens for mark in marks if mark.num_log_tokens <= num_log_tokens), default=0)
    return max(0, num_log_tokens - max(last_whole, cut.num_log_tokens - cut.num_sampled))
