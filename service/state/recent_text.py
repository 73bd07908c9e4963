"""The last tokens that a session has read, and the state before them: the part of its past that can be inspected."""

from __future__ import annotations

import dataclasses
import time
import uuid

from nsm_core.errors import NsmError
from service.backends.base import InferenceBackend
from service.state.at_position import read_up_to, with_newest
from service.stores.sessions.base import SessionHead, SessionStore


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecentText:
    """`ids`: the tokens; `position`: those before them; `state`: after these, None: the start of a text."""

    ids: tuple[int, ...]
    position: int
    state: bytes | None


async def recent_text(
    backend: InferenceBackend, store: SessionStore, head: SessionHead, *, num_tokens: int, timeout_s: float
) -> RecentText:
    """Of the session at `head`, whose log the running model can read: its last `num_tokens` fed tokens, or all it has.

    The state is read from the nearest retained snapshot. Raises the engine's error.
    """
    ids = await store.read_log(head.key, stop=head.position)
    split = max(0, len(ids) - num_tokens)
    if split == 0:
        return RecentText(ids=ids, position=0, state=None)
    reading = await read_up_to(
        backend,
        store,
        head.key,
        ids[:split],
        retained=with_newest(await store.list_retained(head.key), head),
        marks=await store.log_marks(head.key),
        request_id=f"states-{uuid.uuid4().hex}",
        deadline=time.monotonic() + timeout_s,
    )
    end = reading.finished.end_state
    if end is None:
        raise reading.finished.error or NsmError("the session's earlier state could not be read")
    return RecentText(ids=ids[split:], position=split, state=end.state)
