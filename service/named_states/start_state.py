"""A state that texts start from: named, or come with a request. Its file is a session's, with log and snapshot."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

from nsm_core.engine.request import Resume
from nsm_core.errors import InvalidRequest
from nsm_core.state.snapshot import SamplerState, Snapshot
from service.stores.sessions.base import NewSession
from service.stores.sessions.key import SessionKey
from service.transfer.import_session import require_read
from service.transfer.session_file import SessionFile


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartState:
    """A state of the running model. `reference`: its name and version; None for one that came with the request."""

    file: SessionFile
    reference: str | None = None

    @property
    def snapshot(self) -> Snapshot:
        return snapshot_of(self.file)

    @functools.cached_property
    def resume(self) -> Resume:
        """One value for all requests that start here."""
        snapshot = self.snapshot
        return Resume(
            state=snapshot.state,
            position=snapshot.header.position,
            fingerprint=snapshot.header.model_fingerprint,
            generated_counts=snapshot.header.sampler.generated_counts,
        )

    @property
    def pending_ids(self) -> tuple[int, ...]:
        """The token sampled last, if the state has not read it."""
        pending = self.snapshot.header.pending_id
        return () if pending is None else (pending,)

    @property
    def ends_with_answer(self) -> bool:
        """Whether the last tokens were sampled: what comes next in a chat ends that answer first."""
        return self.file.header.marks[-1].num_sampled > 0


def snapshot_of(file: SessionFile) -> Snapshot:
    """Raises InvalidRequest for the file of an empty session, and for one whose log goes on behind its state."""
    if not file.log_ids:
        raise InvalidRequest("a state must have read at least 1 token, this one has read none", param="state")
    if file.snapshot is None or file.snapshot.header.version != file.header.version:
        raise InvalidRequest("the file's state is behind its log: export the session again", param="state")
    return file.snapshot


def renamed(file: SessionFile, *, tenant: str, session_id: str) -> SessionFile:
    """The same state as `tenant`'s, under another id."""
    snapshot = snapshot_of(file)
    header = dataclasses.replace(snapshot.header, tenant=tenant, session_id=session_id)
    return dataclasses.replace(
        file,
        header=dataclasses.replace(file.header, session_id=session_id, metadata={}, ttl_s=None, forked_from=None),
        snapshot=Snapshot(header, snapshot.state),
    )


def session_from(
    start: StartState, key: SessionKey, *, seed: int, metadata: Mapping[str, str], ttl_s: float | None = None
) -> NewSession:
    """A session that begins where `start` stands, and draws with a seed of its own. Megabytes are encoded here.

    Raises InvalidRequest for a tuned state.
    """
    require_read(start.file, param="state")
    file = renamed(start.file, tenant=key.tenant, session_id=key.session_id)
    snapshot, marks = snapshot_of(file), file.header.marks
    sampler = SamplerState(seed=seed, generated_counts=snapshot.header.sampler.generated_counts)
    header = dataclasses.replace(snapshot.header, sampler=sampler)
    return NewSession(
        key=key,
        model_fingerprint=header.model_fingerprint,
        metadata=metadata,
        ttl_s=ttl_s,
        version=file.header.version,
        position=file.header.position,
        snapshot=Snapshot(header, snapshot.state).encode(),
        log_ids=file.log_ids,
        marks=(*marks[:-1], dataclasses.replace(marks[-1], seed=seed)),
    )
