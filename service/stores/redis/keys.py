"""Names of Redis keys. All of a session's share one hash tag, so that a cluster keeps them on one server."""

from __future__ import annotations

import dataclasses
import functools

from nsm_core.hashing import identity_of
from service.stores.sessions.key import SessionKey
from service.stores.sessions.retention import MAX_RETAINED

KNOWN_SESSIONS = 1024  # whose names are remembered: two turns have them made ten times


@dataclasses.dataclass(frozen=True, slots=True)
class SessionKeys:
    """The keys of one session, in the scripts' order except staged values, which have a name for each call.

    `retained`: the slots for older snapshots.
    """

    head: str
    log: str
    marks: str
    snapshot: str
    stage: str  # prefix
    turns: str
    tail: str
    retained: tuple[str, ...]

    def all(self, nonce: str) -> tuple[str, ...]:
        first = (self.head, self.log, self.marks, self.snapshot, self.staged(nonce), self.turns, self.tail)
        return (*first, *self.retained)

    def staged(self, nonce: str) -> str:
        return f"{self.stage}:{nonce}"


STATE_HEADS = "state-heads"


@dataclasses.dataclass(frozen=True, slots=True)
class StateKeys:
    """The keys of a tenant's named states. `index`: in the scripts' order."""

    tag: str

    @property
    def heads(self) -> str:
        return f"{self.tag}:{STATE_HEADS}"

    @property
    def index(self) -> tuple[str, str, str]:
        return self.heads, self.newest, f"{self.tag}:state-additions"

    @property
    def newest(self) -> str:
        """The newest version of each name."""
        return f"{self.tag}:state-versions"

    def file(self, nonce: str) -> str:
        """The bytes of one state."""
        return f"{self.tag}:state:{nonce}"


@dataclasses.dataclass(frozen=True, slots=True)
class Keyspace:
    """`prefix` lets installations share a server."""

    prefix: str

    def session(self, key: SessionKey) -> SessionKeys:
        """Tenant and session are hashed: no character of theirs can break the tag or reach another tenant's keys."""
        return _session_keys(self.prefix, key)

    def tenant(self, tenant: str) -> tuple[str, ...]:
        """The tenant's index, in its scripts' order."""
        tag = f"{self.prefix}:{{{_tenant_hash(tenant)}}}"
        return tuple(f"{tag}:{name}" for name in ("index", "sizes", "expiry", "usage", "expired"))

    def states(self, tenant: str) -> StateKeys:
        """Of a tenant's named states: one hash tag for all."""
        return StateKeys(f"{self.prefix}:{{{_tenant_hash(tenant)}}}")

    def record(self, tenant: str, kind: str, record_id: str) -> str:
        """A document's key: a hash tag for itself alone."""
        return f"{self.prefix}:{{{_tenant_hash(tenant)}-{identity_of(tenant, kind, record_id)}}}:record"

    def documents(self, tenant: str) -> tuple[str, str]:
        """Sizes of the tenant's documents: each one's, and the sum."""
        tag = f"{self.prefix}:{{{_tenant_hash(tenant)}}}"
        return f"{tag}:documents", f"{tag}:document-bytes"

    def any_record(self, tenant: str | None) -> str:
        """A pattern for the documents of one tenant, or of all."""
        return f"{self.prefix}:{{{'*' if tenant is None else _tenant_hash(tenant)}-*}}:record"

    @property
    def any_state_heads(self) -> str:
        """A pattern for the tables of all tenants' named states."""
        return f"{self.prefix}:{{*}}:{STATE_HEADS}"

    @property
    def any_head(self) -> str:
        """A pattern for the heads of all sessions."""
        return f"{self.prefix}:{{*.*}}:head"

    @staticmethod
    def tenant_tag(head_key: bytes) -> bytes:
        """The common start of one tenant's head keys."""
        return head_key.rpartition(b".")[0]

    @property
    def layout_version(self) -> str:
        return f"{self.prefix}:layout-version"

    @property
    def probe(self) -> str:
        return f"{self.prefix}:probe"


@functools.lru_cache(maxsize=KNOWN_SESSIONS)
def _session_keys(prefix: str, key: SessionKey) -> SessionKeys:
    tag = f"{prefix}:{{{_tenant_hash(key.tenant)}.{identity_of(*key)}}}"
    names = ("head", "log", "marks", "snapshot", "staged", "turns", "tail")
    retained = tuple(f"{tag}:retained:{slot}" for slot in range(1, MAX_RETAINED + 1))
    head, log, marks, snapshot, stage, turns, tail = (f"{tag}:{name}" for name in names)
    return SessionKeys(head, log, marks, snapshot, stage, turns, tail, retained)


def _tenant_hash(tenant: str) -> str:
    """16 hexadecimal digits: no character of a tenant's name gets into a key."""
    return identity_of(tenant, num_bytes=8)
