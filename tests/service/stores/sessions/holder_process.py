"""A process that takes a session's lease, says so, and then sits there: `python -m ... FILE SESSION`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from service.stores.sessions.key import SessionKey
from service.stores.sessions.sqlite import SqliteSessionStore


async def main(path: Path, session_id: str) -> None:
    store = SqliteSessionStore(path)
    await store.open()
    await store.acquire(SessionKey("default", session_id), holder="sits there", lease_s=3_600.0)
    print("acquired", flush=True)  # noqa: T201 - the pipe to the test
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
