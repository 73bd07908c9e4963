"""States that were trained: their files, and where they may be used.

Such a state is numbers that a training found, so it belongs to one model and cannot be made again from a log. It was
computed in no numerics class: a request that starts from it begins the same in each of them.
"""

from __future__ import annotations

import dataclasses
import time

from nsm_core.errors import StateMismatch
from nsm_core.model_info import ModelInfo
from nsm_core.state.quantize import StateFormat
from nsm_core.state.snapshot import SamplerState, Snapshot, SnapshotHeader
from service.backends.base import InferenceBackend
from service.named_states.start_state import snapshot_of
from service.stores.sessions.base import LogMark
from service.transfer.import_session import require_fit, require_tokenizer
from service.transfer.session_file import TUNED_ID, FileHeader, SessionFile

NUMERICS = "tuned"  # of the state itself; what goes on from it has the class that computed it
SOURCE = "tuned"  # of the named state


def tuned_file(
    state: bytes, *, model: ModelInfo, tokenizer_fingerprint: str, tenant: str, name: str, state_format: StateFormat
) -> SessionFile:
    """The file of `state` (`StateSpec.pack`), which stands after the start-of-text token."""
    mark = LogMark(version=1, num_log_tokens=1, num_sampled=0, seed=0)
    header = SnapshotHeader(
        model_fingerprint=model.fingerprint,
        numerics=NUMERICS,
        tokenizer_fingerprint=tokenizer_fingerprint,
        layout=model.state_layout,
        stored_dtype=state_format.dtype,
        rounded_to=state_format.dtype,
        position=1,
        pending_id=None,
        sampler=SamplerState(seed=0, generated_counts={}),
        tenant=tenant,
        session_id=name,
        version=1,
        parent=0,
        created_at=time.time(),
    )
    file_header = FileHeader(
        session_id=name,
        model_fingerprint=model.fingerprint,
        tokenizer_fingerprint=tokenizer_fingerprint,
        version=1,
        position=1,
        metadata={},
        ttl_s=None,
        forked_from=None,
        marks=(mark,),
    )
    return SessionFile(header=file_header, log_ids=(TUNED_ID,), snapshot=Snapshot(header, state))


def tuned_for(file: SessionFile, backend: InferenceBackend) -> SessionFile:
    """The file as one of the running model and numerics class. Megabytes are checked here.

    Raises StateMismatch for another model's, and for the end of a request that another numerics class has computed from
    a tuned state.
    """
    model, snapshot = backend.model, snapshot_of(file)
    if file.header.model_fingerprint != model.fingerprint:
        raise StateMismatch(
            f"the state was tuned for model {file.header.model_fingerprint[:12]}, this server runs "
            f"{model.fingerprint[:12]}: tune it again for this one"
        )
    require_tokenizer(file, backend)
    require_fit(snapshot, model)
    numerics = snapshot.header.numerics
    if numerics == model.numerics:
        return file
    if numerics != NUMERICS:
        raise StateMismatch(
            f"the state was computed as {numerics} from a tuned one, and this server computes as {model.numerics}. It "
            "has no log to rebuild it from: send it to a server of its class"
        )
    header = dataclasses.replace(snapshot.header, numerics=model.numerics)
    return dataclasses.replace(file, snapshot=Snapshot(header, snapshot.state))
