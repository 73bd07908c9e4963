"""Files of states: from ids that are read, from another model's file, and from the end of a request."""

from __future__ import annotations

import asyncio
import dataclasses
import time

from nsm_core.engine.request import EndState, FinishReason
from nsm_core.errors import NsmError
from nsm_core.state.quantize import StateFormat, coarsest
from nsm_core.state.snapshot import SamplerState, Snapshot, SnapshotHeader
from service.backends.base import InferenceBackend
from service.named_states.start_state import StartState
from service.state.prefill import read_again
from service.stores.sessions.base import LogMark
from service.transfer.session_file import FileHeader, SessionFile
from service.turns.turn import stopping

NO_SEED = 0  # of a state that was only read: a session that starts from it draws its own
RETURNED = "returned"  # the id in the file of a request's end


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """How ids are read into a state. `deadline`: a `time.monotonic()` reading; `state_format`: of the stored state."""

    backend: InferenceBackend
    request_id: str
    deadline: float
    state_format: StateFormat

    async def file_of(self, ids: tuple[int, ...], *, tenant: str, name: str) -> SessionFile:
        """The state after `ids`, at least one. Raises what `InferenceBackend.submit` raises.

        The last id is pending: whatever starts there reads it first, and so has a log-probability for what comes next.
        """
        fed, pending = (ids[:-1], ids[-1]) if len(ids) > 1 else (ids, None)
        finished = await read_again(self.backend, fed, request_id=self.request_id, deadline=self.deadline)
        if finished.end_state is None:
            is_aborted = finished.reason is FinishReason.ABORT
            raise stopping() if is_aborted else finished.error or NsmError("the engine failed on this request")
        mark = LogMark(version=1, num_log_tokens=len(ids), num_sampled=0, seed=NO_SEED)
        end = dataclasses.replace(finished.end_state, generated_counts={}, pending=pending, position=len(fed))
        return file_at(
            self.backend, end, ids, (mark,), tenant=tenant, name=name, state_format=self.state_format
        )  # fmt: skip


def file_at(
    backend: InferenceBackend,
    end: EndState,
    log_ids: tuple[int, ...],
    marks: tuple[LogMark, ...],
    *,
    tenant: str,
    name: str,
    state_format: StateFormat,
    rounding: StateFormat = StateFormat.FP32,
    earlier_numerics: tuple[str, ...] = (),
) -> SessionFile:
    """The file of a state with its log. `rounding`: the coarsest format that it was computed from; `earlier_numerics`:
    as in its header.
    """
    model, tokenizer, mark = backend.model, backend.tokenizer, marks[-1]
    header = SnapshotHeader(
        model_fingerprint=model.fingerprint,
        numerics=model.numerics,
        tokenizer_fingerprint=tokenizer.fingerprint,
        layout=model.state_layout,
        stored_dtype=state_format.dtype,
        rounded_to=coarsest(state_format, rounding).dtype,
        position=end.position,
        pending_id=end.pending,
        sampler=SamplerState(seed=mark.seed or NO_SEED, generated_counts=end.generated_counts),
        tenant=tenant,
        session_id=name,
        version=mark.version,
        parent=mark.version - 1,
        created_at=time.time(),
        earlier_numerics=earlier_numerics,
    )
    file_header = FileHeader(
        session_id=name,
        model_fingerprint=model.fingerprint,
        tokenizer_fingerprint=tokenizer.fingerprint,
        version=mark.version,
        position=end.position,
        metadata={},
        ttl_s=None,
        forked_from=None,
        marks=marks,
    )
    return SessionFile(header=file_header, log_ids=log_ids, snapshot=Snapshot(header, end.state))


async def end_file(
    backend: InferenceBackend,
    end: EndState,
    *,
    before_ids: tuple[int, ...],
    num_prompt: int,
    seed: int,
    start: StartState | None,
    tenant: str,
    state_format: StateFormat,
    rounding: StateFormat,
    earlier_numerics: tuple[str, ...],
) -> SessionFile:
    """The end of a stateless request. `before_ids`: what was read before its prompt, of `num_prompt` tokens.

    `rounding`, `earlier_numerics`: of a state that it resumed which has no file here.
    """
    log_ids = before_ids + end.new_ids
    earlier = () if start is None else start.file.header.marks
    version = 1 + (earlier[-1].version if earlier else 0)
    mark = LogMark(
        version=version, num_log_tokens=len(log_ids), num_sampled=len(end.new_ids) - num_prompt, seed=seed
    )  # fmt: skip
    if start is not None:
        resumed = start.snapshot.header
        rounding, earlier_numerics = coarsest(rounding, resumed.rounding), resumed.earlier_numerics
    return await asyncio.to_thread(
        lambda: file_at(
            backend,
            end,
            log_ids,
            (*earlier, mark),
            tenant=tenant,
            name=RETURNED,
            state_format=state_format,
            rounding=rounding,
            earlier_numerics=earlier_numerics,
        )
    )
