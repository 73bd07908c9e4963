"""A process that commits to a SQLite store until it is done or killed: `python -m ... FILE SESSION NUM_COMMITS TOKEN`.

Each commit appends its version, or TOKEN when that is not 0. A line with the version follows each acknowledged commit.
"""

from __future__ import annotations

import asyncio
import sys
import uuid
from pathlib import Path

from nsm_core.errors import SessionBusy, VersionConflict
from service.stores.sessions.base import Commit, NewSession
from service.stores.sessions.key import SessionKey
from service.stores.sessions.sqlite import SqliteSessionStore
from tests.support.snapshots import make_snapshot


def turn_ids(version: int) -> tuple[int, ...]:
    """What the turn that leads to `version` appends to the log."""
    return (version,) * (version % 5 + 1)


async def main(path: Path, session_id: str, num_commits: int, token: int) -> None:
    store = SqliteSessionStore(path)
    await store.open()
    try:
        await store.create(NewSession(key=SessionKey("default", session_id), model_fingerprint="m1", metadata={}))
    except VersionConflict:
        pass  # an earlier run or the process beside this one was first
    num_done = 0
    while num_done < num_commits:
        try:
            leased = await store.acquire(SessionKey("default", session_id), holder=uuid.uuid4().hex, lease_s=60.0)
        except SessionBusy:
            continue
        head = leased.stored.head
        version = head.version + 1
        new_ids = (token,) if token else turn_ids(version)
        position = head.position + len(new_ids)
        snapshot = make_snapshot(session_id=session_id, version=version, position=position, num_floats=50_000)
        await store.commit(
            leased.lease,
            Commit(
                expected_version=head.version,
                snapshot=snapshot.encode(),
                position=position,
                model_fingerprint="m1",
                new_ids=new_ids,
                num_sampled=0,
                seed=0,
            ),
        )
        num_done += 1
        print(version, flush=True)  # noqa: T201 - the pipe to the test
    await store.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
