"""A session's state before and after a turn: head and snapshot, checked against each other.

A state is used only if it is the right one: of this tenant and session, at the head's version and position, made by the
model that runs. One that is missing, damaged or another model's is made again from the token log, by a model with the
same tokenizer. Anything else is an error that says so; a session never goes on from an empty state by accident.
"""

from __future__ import annotations

import asyncio
import dataclasses
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
from service.state.rebuild import LostState, RebuildReason, Replay
from service.stores.sessions.base import SessionHead, StoredSession
from service.stores.sessions.key import SessionKey


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """A request to continue a session.

    `is_verbatim`: the ids were given as ids, and nothing is put in front of a first turn. `has_own_seed`: whether the
    client named `sampling.seed`; otherwise the session's own is used once it has one. `expected_version`: None or the
    version the client believes the session is at. `arrival`, `deadline`: `time.monotonic()` readings.

    `request_id` is the turn's id. `identity`, `digest`: see TurnStart; a request with an identity that a turn was begun
    for already gets that turn. `render_options`: how the answer is rendered, as JSON values, for readers of the stored
    turn. `is_resumable`: its client learns the id before the end, so that it can read on where the turn goes on.
    `include_routing`: of this process only, its record has none.
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ResumedSession:
    """A session at the start of a turn. Built by `resume`, which checks.

    `snapshot` is None when the session has had none, or when `replay` stands in for it. `rounding`: the coarsest format
    that the state, or one that it was computed from, has been stored in.
    """

    head: SessionHead
    snapshot: Snapshot | None
    model: ModelInfo
    tokenizer: Tokenizer
    replay: Replay | None = None
    rounding: StateFormat = StateFormat.FP32

    @property
    def rebuilt(self) -> RebuildReason | None:
        """Why this turn reads the whole log again; None if it does not."""
        return None if self.replay is None else self.replay.reason

    @property
    def pending_id(self) -> int | None:
        """The token sampled last and not fed yet."""
        if self.replay is not None:
            return self.replay.log_ids[-1] if self.head.num_log_tokens > self.head.position else None
        return self.snapshot.header.pending_id if self.snapshot else None

    @property
    def _known_ids(self) -> tuple[int, ...]:
        """Tokens of the log that the engine reads again."""
        if self.replay is not None:
            return self.replay.log_ids
        return () if self.pending_id is None else (self.pending_id,)

    @property
    def other_numerics(self) -> str | None:
        """The numerics class that made the state, if not the one that runs: bits may differ from an unbroken run."""
        if self.snapshot is None or self.snapshot.header.numerics == self.model.numerics:
            return None
        return self.snapshot.header.numerics

    @property
    def energy_joules(self) -> float:
        """Of all turns before this one, as far as it is known: a state that is made again from the log has none."""
        return self.snapshot.header.energy_joules if self.snapshot else 0.0

    def generation_request(self, turn: TurnRequest) -> GenerationRequest:
        """The engine's request for `turn`; raises InvalidRequest when there is nothing to read."""
        return GenerationRequest(
            request_id=turn.request_id,
            prompt_ids=self._prompt_ids(turn),
            sampling=self._sampling(turn),
            resume=self._resume(),
            keep_state=True,
            deadline=turn.deadline,
            generated_counts={} if self.replay is None else self.replay.generated_counts,
            include_routing=turn.include_routing,
            owner=turn.key.tenant,
        )

    def _prompt_ids(self, turn: TurnRequest) -> tuple[int, ...]:
        if self.pending_id is None and not turn.input_ids:
            raise InvalidRequest(
                "input must not be empty: this session has no sampled token that waits to be read", param="input"
            )
        if self.head.num_log_tokens == 0 and not turn.is_verbatim:
            return (self.tokenizer.end_of_text_id, *turn.input_ids)
        return (*self._known_ids, *turn.input_ids)

    def _sampling(self, turn: TurnRequest) -> SamplingParams:
        seed = self.replay.seed if self.replay is not None else None
        if self.snapshot is not None:
            seed = self.snapshot.header.sampler.seed
        if seed is None or turn.has_own_seed:
            return turn.sampling
        return dataclasses.replace(turn.sampling, seed=seed)

    def _resume(self) -> Resume | None:
        if self.snapshot is None:
            return None
        header = self.snapshot.header
        return Resume(
            state=self.snapshot.state,
            position=header.position,
            fingerprint=header.model_fingerprint,
            generated_counts=header.sampler.generated_counts,
        )

    def new_log_ids(self, end: EndState) -> tuple[int, ...]:
        """The tokens that the turn adds to the log. Raises SnapshotCorrupt."""
        new_ids = end.new_ids[len(self._known_ids) :]
        num_log_tokens = self.head.num_log_tokens + len(new_ids)
        _require_log(self.head, num_log_tokens, end.position, end.pending)
        return new_ids

    async def encode_next(self, end: EndState, *, seed: int, created_at: float, state_format: StateFormat) -> bytes:
        """`next_snapshot` as bytes; in a thread, as megabytes are rounded and hashed."""
        return await asyncio.to_thread(
            lambda: self.next_snapshot(end, seed=seed, created_at=created_at, state_format=state_format).encode()
        )

    def next_snapshot(
        self, end: EndState, *, seed: int, created_at: float, state_format: StateFormat, joules: float = 0.0
    ) -> Snapshot:
        """The state after the turn, as the session's next version, to be stored in `state_format`. `seed`: of the
        turn's sampling; `joules`: its energy.
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
            version=self.head.version + 1,
            parent=self.head.version,
            created_at=created_at,
            energy_joules=self.energy_joules + joules,
        )
        return Snapshot(header, end.state)


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
    if stored.snapshot is None:
        _require_log(head, head.num_log_tokens, 0, None)
        return ResumedSession(head=head, snapshot=None, model=model, tokenizer=tokenizer)
    try:
        snapshot = Snapshot.decode(stored.snapshot, is_verified=True)  # by the store, when it loaded it
    except SnapshotCorrupt:  # in spite of its checksum: bytes that this build does not understand
        return resume(dataclasses.replace(stored, snapshot=None, damage="corrupt"), model=model, tokenizer=tokenizer)
    header = snapshot.header
    _require_owner(header, head)
    _require_log(head, head.num_log_tokens, header.position, header.pending_id)
    _require_tokenizer(header, model, tokenizer)
    if header.model_fingerprint != model.fingerprint:
        return LostState(reason="fingerprint_mismatch", sampler=header.sampler)
    if header.layout != model.state_layout:
        raise SnapshotCorrupt(f"the state of session {head.session_id!r} has another layout than its model's")
    if implausible_tensor(header.layout, snapshot.state) is not None:  # the log is as good as ever
        return LostState(reason="corrupt", sampler=header.sampler)
    return ResumedSession(head=head, snapshot=snapshot, model=model, tokenizer=tokenizer, rounding=header.rounding)


def require_version(head: SessionHead, expected_version: int | None) -> None:
    """Raises VersionConflict when the client named a version and the session is at another."""
    if expected_version is not None and head.version != expected_version:
        raise version_conflict(head, expected_version)


def version_conflict(head: SessionHead, expected_version: int | None) -> VersionConflict:
    """The error for the client that named the version."""
    message = f"session {head.session_id!r} is at version {head.version}, expected_version was {expected_version}"
    return VersionConflict(message, param="expected_version")


def _require_owner(header: SnapshotHeader, head: SessionHead) -> None:
    for name in ("tenant", "session_id", "version", "position", "model_fingerprint"):
        found, expected = getattr(header, name), getattr(head, name)
        if found != expected:
            # neither value of a tenant or id is shown: the stored one may be somebody else's
            raise SnapshotCorrupt(
                f"the state stored for session {head.session_id!r} has another {name}; it is not used"
            )


def _require_tokenizer(header: SnapshotHeader, model: ModelInfo, tokenizer: Tokenizer) -> None:
    """The ids of a log mean nothing to a model with another tokenizer."""
    if header.tokenizer_fingerprint != tokenizer.fingerprint:
        raise StateMismatch(
            f"session {header.session_id!r} was made by model {header.model_fingerprint[:12]} with another tokenizer "
            f"than that of model {model.fingerprint[:12]}, the one that runs"
        )


def _require_log(head: SessionHead, num_log_tokens: int, position: int, pending_id: int | None) -> None:
    """The log holds everything fed and the pending token: otherwise a token was lost or read twice."""
    expected = position + (pending_id is not None)
    if num_log_tokens != expected:
        raise SnapshotCorrupt(
            f"the token log of session {head.session_id!r} has {num_log_tokens} tokens where the state says {expected}"
        )
