"""A file becomes a session, if the model that runs can go on with it."""

from __future__ import annotations

import asyncio
import dataclasses
import time

from nsm_core.engine.request import FinishReason
from nsm_core.errors import InvalidRequest, NsmError, StateMismatch
from nsm_core.model_info import ModelInfo
from nsm_core.state.layout import StateLayout
from nsm_core.state.plausible import implausible_tensor
from nsm_core.state.quantize import StateFormat
from nsm_core.state.snapshot import SamplerState, Snapshot, SnapshotHeader
from service.backends.base import InferenceBackend
from service.state.prefill import read_again
from service.state.rebuild import sampled_counts, seed_of
from service.stores.sessions.base import DEFAULT_TENANT, NewSession, SessionHead, SessionStore
from service.stores.sessions.key import SessionKey
from service.stores.sessions.transitions import SnapshotMark
from service.transfer.session_file import SessionFile
from service.turns.turn import stopping


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ImportRequest:
    """`metadata` and `ttl_s` are the file's, checked. `deadline`: a `time.monotonic()` reading, for a rebuild;
    `state_format`: how a rebuilt state is stored. One that fits is stored as it stands in the file.
    """

    request_id: str
    key: SessionKey
    metadata: dict[str, str]
    ttl_s: float | None
    is_rebuild_allowed: bool
    deadline: float
    state_format: StateFormat = StateFormat.FP32


async def import_session(
    backend: InferenceBackend, store: SessionStore, file: SessionFile, request: ImportRequest
) -> tuple[SessionHead, bool]:
    """The new session, and whether its state was made again by the running model.

    Raises StateMismatch for a file of another model (with another tokenizer: in any case), InvalidRequest for one that
    lies about its model, VersionConflict when the id exists.
    """
    model = backend.model
    require_read(file)
    require_tokenizer(file, backend)
    is_own = file.header.model_fingerprint == model.fingerprint
    if not is_own and not request.is_rebuild_allowed:
        raise StateMismatch(
            f"the file is of model {file.header.model_fingerprint}, this server runs {model.fingerprint}; both have "
            "the same tokenizer, so rebuild=true would read the file's token log again under the running model"
        )
    snapshot = file.snapshot
    if snapshot is not None and is_own:
        await asyncio.to_thread(require_fit, snapshot, model)
    elif file.log_ids:
        snapshot = await rebuild(
            backend,
            file,
            snapshot,
            request_id=request.request_id,
            deadline=request.deadline,
            state_format=request.state_format,
        )
    if snapshot is not None:
        header = dataclasses.replace(snapshot.header, tenant=request.key.tenant, session_id=request.key.session_id)
        snapshot = Snapshot(header, snapshot.state)
    new = NewSession(
        key=request.key,
        model_fingerprint=model.fingerprint,
        metadata=request.metadata,
        ttl_s=request.ttl_s,
        forked_from=file.header.forked_from,
        version=file.header.version,
        position=file.header.position,
        snapshot=None if snapshot is None else await asyncio.to_thread(snapshot.encode),
        snapshot_mark=None if snapshot is None else SnapshotMark(snapshot.header.version, snapshot.header.position),
        log_ids=file.log_ids,
        marks=file.header.marks,
        tokenizer_fingerprint=backend.tokenizer.fingerprint if file.log_ids else "",
        numerics=file.header.numerics if is_own else model.numerics,
        energy_joules=file.header.energy_joules,
    )
    head = await store.create(new)
    return head, not is_own and snapshot is not None


def require_read(file: SessionFile, *, param: str | None = None) -> None:
    """Raises InvalidRequest for a tuned state: a session is made again from its log, which such a state is not."""
    if file.is_tuned:
        raise InvalidRequest(
            "a tuned state cannot become a session, which must follow from its log; start requests that store nothing "
            "from it, and keep what return_state gives",
            param=param,
        )


def require_tokenizer(file: SessionFile, backend: InferenceBackend) -> None:
    """Raises StateMismatch for a file of another tokenizer, InvalidRequest for ids that are none of the model's."""
    if file.header.tokenizer_fingerprint != backend.tokenizer.fingerprint:
        raise StateMismatch(
            f"the file is of model {file.header.model_fingerprint} with tokenizer {file.header.tokenizer_fingerprint}, "
            f"this server runs {backend.model.fingerprint} with tokenizer {backend.tokenizer.fingerprint}: "
            "its tokens mean something else here"
        )
    log_ids = file.log_ids[1:] if file.is_tuned else file.log_ids
    _require_known((*log_ids, *_counted_ids(file.snapshot)), backend.model.vocab_size)


def _counted_ids(snapshot: Snapshot | None) -> tuple[int, ...]:
    return () if snapshot is None else tuple(snapshot.header.sampler.generated_counts)


def _require_known(ids: tuple[int, ...], vocab_size: int) -> None:
    if max(ids, default=0) >= vocab_size:
        raise InvalidRequest(
            f"the file names token {max(ids)}, the vocabulary has {vocab_size}", code="invalid_session_file"
        )


def require_fit(snapshot: Snapshot, model: ModelInfo) -> None:
    """Raises InvalidRequest for a state that is none of the model's, whatever its header says."""
    layout = model.state_layout
    if snapshot.header.layout != layout:
        raise InvalidRequest("the file's state has another layout than its model's", code="invalid_session_file")
    position = StateLayout(layout).read_position(snapshot.state)
    if position != snapshot.header.position:
        message = f"the file's state was reached by {position} tokens, its header says {snapshot.header.position}"
        raise InvalidRequest(message, code="invalid_session_file")
    tensor = implausible_tensor(layout, snapshot.state)
    if tensor is not None:
        message = f"the file's state holds numbers in {tensor} that are not finite, or larger than a model's can be"
        raise InvalidRequest(message, code="invalid_session_file")


async def rebuild(
    backend: InferenceBackend,
    file: SessionFile,
    snapshot: Snapshot | None,
    *,
    request_id: str,
    deadline: float,
    state_format: StateFormat,
) -> Snapshot:
    """The state after the same tokens under the running model; seed and penalty counts are the file's."""
    header, marks = file.header, file.header.marks
    fed, pending = file.log_ids[: header.position], file.log_ids[header.position :]
    finished = await read_again(backend, fed, request_id=request_id, deadline=deadline)
    if finished.end_state is None:
        is_aborted = finished.reason is FinishReason.ABORT
        raise stopping() if is_aborted else finished.error or NsmError("the engine failed on this request")
    model = backend.model
    sampler = SamplerState(seed=seed_of(marks), generated_counts=sampled_counts(file.log_ids, marks))
    if snapshot is not None and snapshot.header.version == header.version:
        sampler = snapshot.header.sampler
    rebuilt = SnapshotHeader(
        model_fingerprint=model.fingerprint,
        numerics=model.numerics,
        tokenizer_fingerprint=backend.tokenizer.fingerprint,
        layout=model.state_layout,
        stored_dtype=state_format.dtype,
        rounded_to=state_format.dtype,
        position=header.position,
        pending_id=pending[0] if pending else None,
        sampler=sampler,
        tenant=DEFAULT_TENANT if snapshot is None else snapshot.header.tenant,
        session_id=header.session_id,
        version=header.version,
        parent=header.version - 1,
        created_at=time.time(),
        energy_joules=header.energy_joules,
    )
    return Snapshot(rebuilt, finished.end_state.state)
