"""Sessions of the fake model, told turn by turn to a store without a gateway: their states are those of their logs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nsm_core.state.snapshot import SamplerState, Snapshot, SnapshotHeader
from service.state.rebuild import sampled_counts
from service.stores.sessions.base import Commit, LogMark, SessionHead, SessionStore
from tests.support.fakes import FakeBackend, state_after
from tests.support.stored_sessions import acquire, create

SEED = 7


def snapshot_of_log(backend: FakeBackend, head: SessionHead, log_ids: tuple[int, ...], **changes: Any) -> Snapshot:
    """The state of `log_ids`, less the last as the pending token, at the version after `head`'s."""
    fields: dict[str, Any] = {
        "model_fingerprint": backend.model.fingerprint,
        "numerics": backend.model.numerics,
        "tokenizer_fingerprint": backend.tokenizer.fingerprint,
        "layout": backend.model.state_layout,
        "position": len(log_ids) - 1,
        "pending_id": log_ids[-1],
        "sampler": SamplerState(seed=SEED, generated_counts={}),
        "tenant": head.tenant,
        "session_id": head.session_id,
        "version": head.version + 1,
        "parent": head.version,
        "created_at": 1.0,
        **changes,
    }
    state = fields.pop("state", None) or state_after(log_ids[: fields["position"]])
    return Snapshot(SnapshotHeader(**fields), state)


async def commit_turns(
    store: SessionStore,
    backend: FakeBackend,
    session_id: str = "s1",
    *,
    turns: int = 3,
    tenant: str = "a",
    changes: Mapping[str, Any] | None = None,
) -> SessionHead:
    """A session of so many turns, in each of which 3 tokens are read and 2 sampled. `changes`: of the last snapshot."""
    head = await create(store, session_id, tenant=tenant, model_fingerprint=backend.model.fingerprint)
    log_ids: tuple[int, ...] = ()
    marks: tuple[LogMark, ...] = ()
    for turn in range(turns):
        new_ids = tuple(range(1 + turn, 6 + turn))
        log_ids += new_ids
        marks += (LogMark(version=turn + 1, num_log_tokens=len(log_ids), num_sampled=2, seed=SEED),)
        sampler = SamplerState(seed=SEED, generated_counts=sampled_counts(log_ids, marks))
        last = (changes or {}) if turn == turns - 1 else {}
        snapshot = snapshot_of_log(backend, head, log_ids, **{"sampler": sampler, **last})
        lease = (await acquire(store, session_id, tenant=tenant)).lease
        head = await store.commit(
            lease,
            Commit(
                expected_version=turn,
                snapshot=snapshot.encode(is_packed=True),  # as a server stores it
                position=len(log_ids) - 1,
                model_fingerprint=backend.model.fingerprint,
                new_ids=new_ids,
                num_sampled=2,
                seed=SEED,
            ),
        )
    return head
