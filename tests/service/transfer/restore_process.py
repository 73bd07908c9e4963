"""A process that restores the backup on its standard input until it is done or killed: `python -m ... STORE`.

STORE: a URL of Redis, or the path of a SQLite file. A line follows each part of the backup that is in the store.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from service.stores.redis.url import parse_redis_url
from service.stores.sessions.base import SessionStore
from service.stores.sessions.redis import RedisSessionStore
from service.stores.sessions.sqlite import SqliteSessionStore
from service.transfer.backup import restore


def open_store(name: str) -> SessionStore:
    is_redis = name.startswith("redis")
    return RedisSessionStore(parse_redis_url(name)) if is_redis else SqliteSessionStore(Path(name))


async def main(name: str) -> None:
    store = open_store(name)
    await store.open()
    async for result in restore(store, sys.stdin.buffer):
        print(result.what, result.name.session_id, result.outcome, flush=True)  # noqa: T201 - the pipe to the test
    await store.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
