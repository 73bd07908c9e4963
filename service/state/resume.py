"""A session's state before and after a turn: head and snapshot, checked against each other.

A state is used only if it is the right one: of this tenant and session, at the version and position that the head
names, made by the model that runs. The log after it is read again, which gives the state of the head. A state that is
missing, damaged or another model's is made again from the whole log, by a model with the same tokenizer. Anything else
is an error that says so; a session never goes on from an empty state by accident.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any

from nsm_core.engine.request import EndState, GenerationRequest, Resume
from nsm_core.errors import InvalidRequest, SnapshotCorrupt, StateMismatch, VersionConflict
from nsm_core.model_info import ModelInfo
from nsm_core.sampling.params import SamplingParams
from nsm_core.state.plausible import implausible_tensor
from nsm_core.state.quantize import StateFormat, coarsest
from nsm_core.state.snapshot import SamplerState, Snapshot, SnapshotHeader
from nsm_core.tokenizer import Tokenizer
from service.state.rebuild import LostState, RebuildReason, Replay, sampled_counts
from service.stores.sessions.base import LogPoint, LogTail, SessionHead, StoredSession
from service.stores.sessions.key import SessionKey
from service.stores.sessions.transitions import EMPTY_TAIL


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """A request to continue a session.

    `is_verbatim`: the ids were given as ids, and nothing is put in front of a first turn. `has_own_seed`: whether the
    client named `sampling.seed`; otherwise the session's own is used once it has one. `expected_version`: None or the
    version the client believes the session is at. `arrival`, `deadline`: `time.monotonic()` readings.

    `request_id` is the turn's id. `identity`, `digest`: see TurnStart; a request with an identity that a turn was begun
    for already gets that turn. `render_options`: how the answer is rendered, as JSON values, for readers of the stored
    turn. `is_resumable`: its client learns the id before the end, so that it can read on where the turn goes on.
    `include_routing`: of this process only, its record has none. `outlasts_engine`: nobody waits who could send it
    again, so it goes on with the next engine when its own has ended.

    `after`: the end of an earlier version, which the turn goes on from in place of the session's end; what is behind it
    is given up with the commit. `num_opening`: how many of `input_ids`, at the end, no later turn may stand on if the
    answer begins with a thought; None: the answer has none.
    """

    request_id: str
    key: SessionKey
    input_ids: tuple[int, ...]
    is_verbatim: bool
    sampling: SamplingParams
    has_own_seed: bool
    arrival: float
    expected_version: int | None = None
    deadline: float | None = None
    identity: str | None = None
    digest: str = ""
    render_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    is_resumable: bool = False
    include_routing: bool = False
    outlasts_engine: bool = False
    after: LogPoint | None = None
    num_opening: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ResumedSession:
    """A session at the start of a turn. Built by `resume`, which checks.

    `snapshot` is None when there is none, or when `replay` stands in for it. `tail`: the log from there, which the turn
    reads before its own input. `rounding`: the coarsest format that the state, or one that it was computed from, has
    been stored in. `earlier_numerics`: without a snapshot, as in the header of the one that the state was read on from.
    `after`: see TurnRequest; `head` then has position and log of that point, and the version that the
    session is at.
    """

    head: SessionHead
    snapshot: Snapshot | None
    model: ModelInfo
    tokenizer: Tokenizer
    replay: Replay | None = None
    tail: LogTail = EMPTY_TAIL
    rounding: StateFormat = StateFormat.FP32
    earlier_numerics: tuple[str, ...] = ()
    after: LogPoint | None = None

    @property
    def position(self) -> int:
        """The tokens that the snapshot covers."""
        return self.snapshot.header.position if self.snapshot else 0

    @property
    def num_replayed(self) -> int:
        """The tokens that the session has read before, and that the turn reads again."""
        return self.head.position - self.position

    @property
    def is_held(self) -> bool:
        """Whether the engine holds the state, so that only this engine can start from it."""
        return self.snapshot is not None and self.snapshot.held is not None

    @property
    def is_cold(self) -> bool:
        """Whether the session has a log and nothing of it is stored as a state."""
        return self.snapshot is None and self.replay is None and self.head.position > 0

    @property
    def rebuilt(self) -> RebuildReason | None:
        """Why this turn reads the whole log again; None if it does not."""
        return None if self.replay is None else self.replay.reason

    @property
    def pending_id(self) -> int | None:
        """The token sampled last and not fed yet."""
        has_pending = self.head.num_log_tokens > self.head.position
        return self._known_ids[-1] if has_pending and self._known_ids else None

    @property
    def _known_ids(self) -> tuple[int, ...]:
        """Tokens of the log that the turn reads: again, or the pending one for the first time."""
        return self.tail.ids if self.replay is None else self.replay.log_ids

    @property
    def fed_ids(self) -> tuple[int, ...]:
        """Tokens of the log after the snapshot that the session has read."""
        return self._known_ids[: -1 if self.pending_id is not None else None]

    @property
    def sampled_at(self) -> tuple[tuple[int, int], ...]:
        """[start, stop) of the tokens that were sampled, of those that the turn reads before its input. Also where
        there are none between two versions, which were read apart.
        """
        if self.replay is not None:
            start, marks = 0, self.replay.marks
        else:
            start, marks = self.position, self.tail.marks
        is_first_pending = self.snapshot is not None and self.snapshot.header.pending_id is not None
        spans = [(0, 1)] if is_first_pending and self._known_ids and self.replay is None else []
        for mark in marks:
            stop = mark.num_log_tokens - start
            if 0 < stop <= len(self._known_ids):
                spans.append((max(0, stop - mark.num_sampled), stop))
        return tuple(spans)

    @property
    def other_numerics(self) -> str | None:
        """The numerics class of the newest version, if not the one that runs: bits may differ from an unbroken run."""
        numerics = self.head.numerics or (self.snapshot.header.numerics if self.snapshot else "")
        return None if self.replay is not None or numerics in ("", self.model.numerics) else numerics

    @property
    def next_earlier_numerics(self) -> tuple[str, ...]:
        """The classes that computed what the turn starts from, without the one that runs."""
        if self.snapshot is None:
            return self.earlier_numerics
        header = self.snapshot.header
        return tuple(sorted({header.numerics, *header.earlier_numerics} - {self.model.numerics}))

    @property
    def energy_joules(self) -> float:
        """Of all turns before this one, as far as it is known."""
        if self.head.energy_joules:
            return self.head.energy_joules
        return self.snapshot.header.energy_joules if self.snapshot else 0.0  # the head's, of before it was kept there

    def generation_request(self, turn: TurnRequest, *, hold_state: bool = False) -> GenerationRequest:
        """The engine's request for `turn`; raises InvalidRequest when there is nothing to read. `hold_state`: the state
        stays with the engine.
        """
        prompt_ids = self._prompt_ids(turn)
        border = None if turn.num_opening is None else len(prompt_ids) - turn.num_opening
        return GenerationRequest(
            request_id=turn.request_id,
            prompt_ids=prompt_ids,
            keep_states_at=() if border is None or border <= len(self._known_ids) else (border,),
            sampling=self._sampling(turn),
            resume=self.resume_state(),
            keep_state=True,
            deadline=turn.deadline,
            generated_counts=self.generated_counts if self.snapshot is None else {},
            include_routing=turn.include_routing,
            owner=turn.key.tenant,
            hold_state=hold_state,
            sampled_at=self.sampled_at,
        )

    def _prompt_ids(self, turn: TurnRequest) -> tuple[int, ...]:
        if self.pending_id is None and not turn.input_ids:
            raise InvalidRequest(
                "input must not be empty without messages: this session has no sampled token that is still to be read",
                param="input",
            )
        if self.head.num_log_tokens == 0 and not turn.is_verbatim:
            return (self.tokenizer.end_of_text_id, *turn.input_ids)
        return (*self._known_ids, *turn.input_ids)

    def _sampling(self, turn: TurnRequest) -> SamplingParams:
        seed = self.seed
        if seed is None or turn.has_own_seed:
            return turn.sampling
        return turn.sampling.with_seed(seed)

    @property
    def seed(self) -> int | None:
        """The newest one; None for a session that has none."""
        if self.replay is not None:
            return self.replay.seed
        in_tail = (mark.seed for mark in reversed(self.tail.marks) if mark.seed is not None)
        return next(in_tail, None if self.snapshot is None else self.snapshot.header.sampler.seed)

    @property
    def generated_counts(self) -> Mapping[int, int]:
        """How often the session sampled each token."""
        if self.replay is not None:
            return self.replay.generated_counts
        before = {} if self.snapshot is None else self.snapshot.header.sampler.generated_counts
        if not self.tail.marks:
            return before
        counts = Counter(before)
        counts.update(sampled_counts(self.tail.ids, self.tail.marks, start=self.position))
        return dict(counts)

    def resume_state(self) -> Resume | None:
        """Where the engine starts; None: at the start of a text."""
        if self.snapshot is None:
            return None
        header = self.snapshot.header
        return Resume(
            state=self.snapshot.state,
            held=self.snapshot.held,
            position=header.position,
            fingerprint=header.model_fingerprint,
            generated_counts=self.generated_counts,
        )

    def new_log_ids(self, end: EndState) -> tuple[int, ...]:
        """The tokens that the turn adds to the log. Raises SnapshotCorrupt."""
        new_ids = end.new_ids[len(self._known_ids) :]
        num_log_tokens = self.head.num_log_tokens + len(new_ids)
        _require_log(self.head, num_log_tokens, end.position, end.pending)
        return new_ids

    def num_new(self, num_prompt: int) -> int:
        """How many of the first `num_prompt` tokens that the turn reads are new to the log."""
        return num_prompt - len(self._known_ids)

    async def encode_next(self, end: EndState, *, seed: int, created_at: float, state_format: StateFormat) -> bytes:
        """`next_snapshot` as bytes; in a thread, as megabytes are rounded and hashed."""
        return await asyncio.to_thread(
            lambda: self.next_snapshot(end, seed=seed, created_at=created_at, state_format=state_format).encode()
        )

    def next_snapshot(
        self,
        end: EndState,
        *,
        seed: int,
        created_at: float,
        state_format: StateFormat,
        joules: float = 0.0,
        num_versions: int = 1,
    ) -> Snapshot:
        """The state after the turn, as the session's next version, to be stored in `state_format`. `seed`: of the
        turn's sampling; `joules`: its energy; `num_versions`: that it is behind the head's.
        """
        header = SnapshotHeader(
            model_fingerprint=self.model.fingerprint,
            numerics=self.model.numerics,
            tokenizer_fingerprint=self.tokenizer.fingerprint,
            layout=self.model.state_layout,
            stored_dtype=state_format.dtype,
            rounded_to=coarsest(state_format, self.rounding).dtype,
            position=end.position,
            pending_id=end.pending,
            sampler=SamplerState(seed=seed, generated_counts=end.generated_counts),
            tenant=self.head.tenant,
            session_id=self.head.session_id,
            version=self.head.version + num_versions,
            parent=self.head.version + num_versions - 1,
            created_at=created_at,
            energy_joules=self.energy_joules + joules,
            earlier_numerics=self.next_earlier_numerics,
        )
        return Snapshot(header, end.state, held=end.held)


def resume_after(head: SessionHead, snapshot: Snapshot, *, model: ModelInfo, tokenizer: Tokenizer) -> ResumedSession:
    """The session at the end of an earlier version, whose state `snapshot` the caller has kept."""
    header = snapshot.header
    point = LogPoint(header.version, header.position)
    return ResumedSession(
        head=head_at(head, point),
        snapshot=snapshot,
        model=model,
        tokenizer=tokenizer,
        rounding=header.rounding,
        after=point,
    )


def head_at(head: SessionHead, point: LogPoint) -> SessionHead:
    """`head` as if the log ended there; its version stays."""
    end = point.num_log_tokens
    at = dataclasses.replace(head, position=end, num_log_tokens=end)
    if head.snapshot_version <= point.version:
        return at
    return dataclasses.replace(at, snapshot_version=0, snapshot_position=0, snapshot_bytes=0)


def resume_known(head: SessionHead, snapshot: Snapshot, *, model: ModelInfo, tokenizer: Tokenizer) -> ResumedSession:
    """The session at its head, whose state `snapshot` the caller has kept since it was computed here."""
    return ResumedSession(
        head=head,
        snapshot=snapshot,
        model=model,
        tokenizer=tokenizer,
        tail=_pending_tail(snapshot.header),
        rounding=snapshot.header.rounding,
    )


def resume(stored: StoredSession, *, model: ModelInfo, tokenizer: Tokenizer) -> ResumedSession | LostState:
    """Decodes and checks what the store gave; LostState when it is to be made again from the log.

    Raises StateMismatch for a session of another tokenizer, also for a damaged state of a model that may have another
    one; SnapshotCorrupt for stored bytes that are not this session's state.
    """
    head = stored.head
    if stored.damage is not None:
        if head.model_fingerprint != model.fingerprint:
            raise StateMismatch(
                f"the state of session {head.session_id!r} is {stored.damage}, and was made by model "
                f"{head.model_fingerprint[:12]}: only that model can make it again, not the running "
                f"{model.fingerprint[:12]}"
            )
        return LostState(reason=stored.damage)
    if stored.snapshot is None and stored.decoded is None:
        return _resume_log(stored, model, tokenizer)
    try:  # the store verified the bytes when it loaded them
        snapshot = stored.decoded or Snapshot.decode(stored.snapshot or b"", is_verified=True)
    except SnapshotCorrupt:  # in spite of its checksum: bytes that this build does not understand
        return resume(dataclasses.replace(stored, snapshot=None, damage="corrupt"), model=model, tokenizer=tokenizer)
    header = snapshot.header
    _require_owner(header, head)
    tail = _tail_after(header, stored)
    _require_tokenizer(head, header.tokenizer_fingerprint, model, tokenizer)
    sampler = header.sampler if head.has_snapshot_at_head else None
    if header.model_fingerprint != model.fingerprint:
        return LostState(reason="fingerprint_mismatch", sampler=sampler)
    if header.layout != model.state_layout:
        raise SnapshotCorrupt(f"the state of session {head.session_id!r} has another layout than its model's")
    if implausible_tensor(header.layout, snapshot.state) is not None:  # the log is as good as ever
        return LostState(reason="corrupt", sampler=sampler)
    return ResumedSession(
        head=head, snapshot=snapshot, model=model, tokenizer=tokenizer, tail=tail, rounding=header.rounding
    )


def _resume_log(stored: StoredSession, model: ModelInfo, tokenizer: Tokenizer) -> ResumedSession | LostState:
    """A session that has no snapshot, and none is missing."""
    head, tail = stored.head, stored.tail or EMPTY_TAIL
    if len(tail.ids) != head.num_log_tokens or head.num_log_tokens - head.position not in (0, 1):
        raise _log_mismatch(head, len(tail.ids), head.position)
    if head.num_log_tokens:
        _require_tokenizer(head, head.tokenizer_fingerprint, model, tokenizer)
        if head.model_fingerprint != model.fingerprint:
            return LostState(reason="fingerprint_mismatch")
    return ResumedSession(head=head, snapshot=None, model=model, tokenizer=tokenizer, tail=tail)


def _tail_after(header: SnapshotHeader, stored: StoredSession) -> LogTail:
    """Raises SnapshotCorrupt when the log does not lead from the snapshot to the head."""
    head = stored.head
    if head.has_snapshot_at_head or stored.tail is None:
        _require_log(head, head.num_log_tokens, header.position, header.pending_id)
        return _pending_tail(header)
    if header.position + len(stored.tail.ids) != head.num_log_tokens:
        raise _log_mismatch(head, head.num_log_tokens, header.position + len(stored.tail.ids))
    return stored.tail


def _pending_tail(header: SnapshotHeader) -> LogTail:
    return LogTail(ids=() if header.pending_id is None else (header.pending_id,))


def require_version(head: SessionHead, expected_version: int | None) -> None:
    """Raises VersionConflict when the client named a version and the session is at another."""
    if expected_version is not None and head.version != expected_version:
        message = f"session {head.session_id!r} is at version {head.version}, expected_version was {expected_version}"
        raise VersionConflict(message, param="expected_version")


def _require_owner(header: SnapshotHeader, head: SessionHead) -> None:
    names = {"version": "snapshot_version", "position": "snapshot_position"}
    for name in ("tenant", "session_id", "version", "position", "model_fingerprint"):
        found, expected = getattr(header, name), getattr(head, names.get(name, name))
        if found != expected:
            # neither value of a tenant or id is shown: the stored one may be somebody else's
            raise SnapshotCorrupt(
                f"the state stored for session {head.session_id!r} has another {name}; it is not used"
            )


def _require_tokenizer(head: SessionHead, fingerprint: str, model: ModelInfo, tokenizer: Tokenizer) -> None:
    """The ids of a log mean nothing to a model with another tokenizer than `fingerprint`'s."""
    if fingerprint != tokenizer.fingerprint:
        raise StateMismatch(
            f"session {head.session_id!r} was made by model {head.model_fingerprint[:12]} with another tokenizer "
            f"than that of model {model.fingerprint[:12]}, the one that runs"
        )


def _require_log(head: SessionHead, num_log_tokens: int, position: int, pending_id: int | None) -> None:
    """The log holds everything fed and the pending token: otherwise a token was lost or read twice."""
    expected = position + (pending_id is not None)
    if num_log_tokens != expected:
        raise _log_mismatch(head, num_log_tokens, expected)


def _log_mismatch(head: SessionHead, num_log_tokens: int, expected: int) -> SnapshotCorrupt:
    return SnapshotCorrupt(
        f"the token log of session {head.session_id!r} has {num_log_tokens} tokens where the state says {expected}"
    )
