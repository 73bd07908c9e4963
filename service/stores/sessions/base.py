"""The seam between the gateway and whatever keeps sessions.

Every method is one atomic transition: it happens as a whole or not at all, whatever other processes do. What a writer
may do is decided by a lease: one holder at a time, for a few seconds, renewed while it works. Each lease has a higher
fence than the one before it, so a holder that was away too long finds its writes refused.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol, runtime_checkable

from service.stores.sessions.key import SessionKey as SessionKey
from service.stores.sessions.lease import Lease as Lease
from service.stores.sessions.retention import RetainedSnapshot
from service.stores.sessions.retention import Shedding as Shedding
from service.stores.sessions.transitions import Commit as Commit
from service.stores.sessions.transitions import LateSnapshot as LateSnapshot
from service.stores.sessions.transitions import LogMark as LogMark
from service.stores.sessions.transitions import LogPoint as LogPoint
from service.stores.sessions.transitions import LogTail as LogTail
from service.stores.sessions.transitions import NewSession as NewSession
from service.stores.sessions.transitions import Rewind as Rewind
from service.stores.sessions.turn_records import TurnRecord, TurnStart, TurnStore

if TYPE_CHECKING:
    from nsm_core.state.snapshot import Snapshot

DEFAULT_TENANT = "default"  # of a server without keys, and of the terminal

Damage = Literal["missing", "corrupt"]


class Unset(enum.Enum):
    """The type of UNSET, which says "leave it as it is" where None has a meaning of its own."""

    UNSET = "unset"


UNSET: Final = Unset.UNSET


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SessionHead:
    """The named, mutable head of a session.

    `version` rises by one with each committed turn and each rewind, from 0 for a session that has had none. It rises by
    two with a turn whose answer began with a thought: what that read is a version of its own. `position` counts the
    tokens fed; times are unix seconds of the store's clock. `created_at` is also the session's incarnation: deleted and
    made again under its old id, it is another one. `ttl_s`: None, or how long the session is kept after its last commit
    or `update`; `expires_at` is when that ends. `forked_from`: "<session id>@<position>" of where it was copied from,
    or None.

    `snapshot_version`, `snapshot_position`, `snapshot_bytes`: of the newest stored snapshot, which may be behind the
    head; zeros without one. `tokenizer_fingerprint`, `numerics`: of what computed the newest version, "" where it is
    not known: of an empty session, or from before these were kept. `energy_joules`: of all its turns, as far as it was
    measured. `replica`: the one that made the newest version, and may have its state in memory: a hint, "" without one.
    """

    tenant: str
    session_id: str
    version: int
    position: int
    created_at: float
    updated_at: float
    model_fingerprint: str
    metadata: Mapping[str, str]
    num_log_tokens: int
    snapshot_bytes: int
    ttl_s: float | None
    expires_at: float | None
    forked_from: str | None
    snapshot_version: int = 0
    snapshot_position: int = 0
    tokenizer_fingerprint: str = ""
    numerics: str = ""
    energy_joules: float = 0.0
    replica: str = ""

    @property
    def has_snapshot_at_head(self) -> bool:
        """Whether the newest snapshot is the state of the newest version."""
        return self.snapshot_version == self.version

    @property
    def newest_snapshot(self) -> RetainedSnapshot | None:
        """The newest stored snapshot, None where there is none."""
        if not self.snapshot_version:
            return None
        return RetainedSnapshot(
            version=self.snapshot_version, position=self.snapshot_position, num_bytes=self.snapshot_bytes
        )

    @property
    def key(self) -> SessionKey:
        return SessionKey(self.tenant, self.session_id)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredSession:
    """A head with its newest encoded snapshot, None for a session that has none, and the log from there.

    `damage`: why a snapshot that should be there is None: not found, or damaged. Only `acquire` answers so,
    because its caller can rebuild the state from the log. `tail`: None of a snapshot at the head that was not read from
    a store. `decoded`: the snapshot in place of its bytes, if they had to be decoded before.
    """

    head: SessionHead
    snapshot: bytes | None
    damage: Damage | None = None
    tail: LogTail | None = None
    decoded: Snapshot | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeasedSession:
    """The result of `acquire`: the lease, and the session under it. `retained`: see `SessionStore.list_retained`.

    `is_known`: the head is the one that the caller knows; neither snapshot nor tail were read. `record`: what
    `begin_turn` without `ends_abandoned` would have given; None also when no turn was to begin.
    """

    lease: Lease
    stored: StoredSession
    retained: tuple[RetainedSnapshot, ...] = ()
    is_known: bool = False
    record: TurnRecord | None = None


class KnownVersion(NamedTuple):
    """A version of a session's incarnation: no two states have one."""

    created_at: float
    version: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SessionPage:
    """One page of a listing, newest first; `next_cursor` is None on the last page."""

    heads: tuple[SessionHead, ...]
    next_cursor: str | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TenantUsage:
    """`num_bytes`: all snapshots', plus 4 for each token of a log, plus what the turn records hold: of a running turn
    its request and its sampled tokens (the newest 16 KiB of that may be missing), of an ended one the result.
    """

    num_sessions: int
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoreRoom:
    """Of `num_bytes` bytes that a store may take, `num_free` are left. `kind`: sqlite or redis."""

    kind: str
    num_free: int
    num_bytes: int


class SessionStore(TurnStore, Protocol):
    """A store of record. Every call names the tenant: another tenant's session does not exist.

    A session whose TTL ran out does not exist either, but for one with a live lease: it lives as long as that does.

    Errors: NotFound (code `session_not_found`, or `session_expired` where the store knows that), VersionConflict,
    SessionBusy, LeaseLost, SnapshotCorrupt, StoreUnavailable, StorageFull. Implementations: `sqlite`, `redis`.
    """

    snapshot_writes: float
    """Bytes that reach the disk for a byte of a snapshot."""
    max_uncounted_request: int
    """The request of a running turn of at most so many bytes is not counted as stored."""

    async def open(self) -> None:
        """Connect, create or check the schema. Raises StoreUnavailable, or ConfigError for an unknown version."""
        ...

    async def close(self) -> None:
        """Idempotent; every acknowledged commit is durable before it returns."""
        ...

    async def create(self, new: NewSession) -> SessionHead:
        """A new session; raises VersionConflict when the id exists for this tenant."""
        ...

    async def update(
        self,
        key: SessionKey,
        *,
        metadata: Mapping[str, str] | None = None,
        ttl_s: float | Unset | None = UNSET,
    ) -> SessionHead:
        """New metadata, as a whole (None: as it was), and TTL (None: kept for ever); raises NotFound.

        Needs no lease and leaves the version alone. `expires_at` moves on in any case.
        """
        ...

    async def get(self, key: SessionKey) -> SessionHead: ...

    async def load(self, key: SessionKey) -> StoredSession:
        """Head, newest snapshot and the log from there in one consistent read, without a lease.

        Raises SnapshotCorrupt when the snapshot is not there or fails its checksum, LogCorrupt when that part of the
        log is damaged.
        """
        ...

    async def acquire(
        self,
        key: SessionKey,
        *,
        holder: str,
        lease_s: float,
        known: KnownVersion | None = None,
        start: TurnStart | None = None,
        max_records: int = 1,
    ) -> LeasedSession:
        """Take the lease and load as `load` does, in one round trip. `holder` names one turn, not a process.

        `known`: the version whose state the caller has. If it is the head's, no snapshot is read. `start`,
        `max_records`: a turn that begins in the same transition, as by `begin_turn` without `ends_abandoned`. At
        another version or of another model than it names (VersionConflict, OtherModel) there is no lease either.

        Raises NotFound, or SessionBusy while another lease lives, also one of the same holder; its `retry_after_s` is
        what remains of that lease, at most 1 s. Raises LogCorrupt, and gives no lease, when number or length of the
        log's parts are not the head's, or the part after the snapshot is damaged. The fence rises by one. A damaged
        snapshot is no error: see `StoredSession.damage`.
        """
        ...

    async def renew(self, lease: Lease, *, lease_s: float) -> Lease:
        """The lease, for `lease_s` from now on. One that expired may be renewed while nobody else has taken it.

        Raises LeaseLost when it was taken or released, or the session is gone or another incarnation.
        """
        ...

    async def release(self, lease: Lease) -> None:
        """Free the session. Idempotent; a lost lease is left alone."""
        ...

    async def commit(self, lease: Lease, commit: Commit) -> SessionHead:
        """Atomically: append the new ids to the token log with a mark, store the snapshot and apply the retention if it
        has one, move the head to the commit's version, end the record of its turn as committed, release the lease.

        Durable when it returns (survives kill -9). Raises NotFound when the session is gone, LeaseLost when the lease
        is not the newest one or was released, or the session is another incarnation, VersionConflict when the head is
        not at the expected version; then nothing changed. A lease that only expired is good enough.
        """
        ...

    async def put_snapshot(self, key: SessionKey, late: LateSnapshot) -> SessionHead | None:
        """Store the state of a version that was committed without it, and apply the retention. Needs no lease, and
        leaves version, log and times alone. The head as it is then; None, and nothing changed, when the session is
        gone or another incarnation, its log does not have that version any more, or a snapshot as new is stored.
        """
        ...

    async def rewind(self, lease: Lease, rewind: Rewind) -> SessionHead:
        """Atomically: cut the log, drop the marks beyond the cut and add one for the new version, replace the snapshot,
        drop the retained snapshots beyond the cut (all, when the model is another), move the head to the new version,
        release the lease.

        Raises the errors of `commit`, with the same promises.
        """
        ...

    async def read_log(self, key: SessionKey, *, stop: int | None = None) -> tuple[int, ...]:
        """Every id fed and sampled, in order; the first `stop` of them when given.

        Raises LogCorrupt when the log is damaged.
        """
        ...

    async def log_marks(self, key: SessionKey) -> tuple[LogMark, ...]:
        """Where each turn ended, oldest first; the last is the head's version and the log's end. Empty at version 0."""
        ...

    async def list_retained(self, key: SessionKey) -> tuple[RetainedSnapshot, ...]:
        """The older snapshots that are still there beside the newest, oldest first. Raises NotFound.

        They go with the session, and a copy has none: whatever they are used for can be had from the log as well.
        """
        ...

    async def load_retained(self, key: SessionKey, *, version: int) -> bytes | None:
        """One of them, or the newest snapshot, encoded; None when it is not there (any more), or its checksum does not
        fit.
        """
        ...

    async def shed_snapshots(self, shedding: Shedding) -> int:
        """Delete snapshots of sessions that nobody uses; how many sessions lost some.

        Version, log and times stay, and a session with a live lease is left alone. It may look at something of every
        session: the server calls it now and then.
        """
        ...

    async def delete(self, key: SessionKey) -> None:
        """Head, snapshots and log are gone when it returns; raises NotFound. A lease does not prevent it."""
        ...

    async def list(self, *, tenant: str, limit: int, cursor: str | None = None) -> SessionPage:
        """Newest first by creation; a cursor stays good whatever is created or deleted.

        Raises InvalidRequest for a cursor that no page gave.
        """
        ...

    async def list_tenants(self) -> tuple[str, ...]:
        """Every tenant with a session, sorted; also one whose sessions have all expired but are not removed yet.

        For whole stores (backups, moves); it may read something of every session.
        """
        ...

    async def usage(self, *, tenant: str) -> TenantUsage:
        """The room of the tenant's sessions; one whose TTL ran out counts until it is removed."""
        ...

    async def room(self) -> StoreRoom | None:
        """Free room of the disk, or of the fullest server's memory; None where nothing bounds the store."""
        ...

    async def remove_expired(self) -> int:
        """Delete, as `delete` does, what does not exist any more because its TTL ran out; how many that were.

        The server calls it about once a minute. A store that expires sessions by itself may have nothing to do.
        """
        ...

    async def check_writable(self) -> None:
        """The readiness probe: a real write; raises StoreUnavailable or StorageFull. A store that has been found
        damaged stays so until it is opened again.
        """
        ...


@runtime_checkable
class HasPool(Protocol):
    """What a store has besides, if it is a server."""

    def num_connections_in_use(self) -> int: ...
