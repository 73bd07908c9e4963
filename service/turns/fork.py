"""A fork: a session that goes on from another one, from its end or from an earlier place of its log."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Mapping, Sequence

from service.backends.base import InferenceBackend
from service.state.copies import create_copy, read_copy
from service.state.earlier import copy_at
from service.stores.sessions.base import LogMark, SessionHead, SessionStore
from service.stores.sessions.key import SessionKey
from service.tenants.tenants import Tenants
from service.turns.turns import TurnRegistry


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ForkRequest:
    """`find_end`: how many tokens of the log it begins with; None: all. `metadata`: None for the source's.

    `find_ttl_s`: its TTL, by the source's. `deadline`: a `time.monotonic()` reading, for the reading of the log.
    """

    source: SessionKey
    target: SessionKey
    deadline: float
    find_end: Callable[[SessionHead, Sequence[LogMark]], int] | None = None
    metadata: Mapping[str, str] | None = None
    find_ttl_s: Callable[[float | None], float | None] = lambda inherited: inherited


async def fork_session(
    turns: TurnRegistry, backend: InferenceBackend, store: SessionStore, tenants: Tenants, request: ForkRequest
) -> SessionHead:
    """A running turn of the source does not prevent it, and is not part of it.

    At the source's end only the log is copied. The state is in memory, or the first turn borrows a snapshot (see
    origin.py). From an earlier place, and where a log does not give the same state again, the fork gets a snapshot.

    Raises NotFound, VersionConflict when the target exists, what `find_end` raises, and what `copy_at` raises.
    """
    keeper = turns.keeper
    copy = await read_copy(store, request.source, with_snapshot=False)
    is_whole = request.find_end is None or request.find_end(copy.head, copy.marks) == copy.head.num_log_tokens
    if not (is_whole and keeper.makes_again(copy.head)):
        copy = await read_copy(store, request.source)
        if request.find_end is not None:
            with tenants.enter(request.source.tenant):
                copy = await copy_at(
                    backend,
                    store,
                    copy,
                    request.find_end(copy.head, copy.marks),
                    request_id=f"fork-{uuid.uuid4().hex}",
                    deadline=request.deadline,
                    state_format=keeper.state_format,
                )
    head = await create_copy(
        store,
        copy,
        request.target,
        metadata=copy.head.metadata if request.metadata is None else request.metadata,
        ttl_s=request.find_ttl_s(copy.head.ttl_s),
        forked_from=f"{request.source.session_id}@{copy.head.position}",
    )
    keeper.copied(copy.head, head)
    return head
