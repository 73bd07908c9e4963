"""Lives of a few sessions on a SQLite file, in a process whose writes are recorded. After each answer, a line with all
that was acknowledged by then: the versions and the token logs.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from pathlib import Path

from service.stores.sessions.sqlite import SqliteSessionStore
from tests.support.fakes import FakeBackend
from tests.support.gateway import Gateway, gateway

NAMES = ("s1", "s2", "s3")
RESTART_EVERY = 25  # calls
RETAINED = 2
Known = dict[str, tuple[int, tuple[int, ...]]]  # version and log by session


async def live(directory: Path, *, num_calls: int, seed: int) -> None:
    rng, known = random.Random(seed), Known()
    acknowledged = os.open(directory / "acknowledged", os.O_CREAT | os.O_WRONLY, 0o600)
    num_bytes = 0
    for start in range(0, num_calls, RESTART_EVERY):
        store = SqliteSessionStore(directory / "sessions.db")
        async with gateway(FakeBackend(), store=store, retained_snapshots=RETAINED) as server:
            for _ in range(min(RESTART_EVERY, num_calls - start)):
                await call(server, rng, known)
                line = json.dumps(known).encode() + b"\n"
                num_bytes += os.pwrite(acknowledged, line, num_bytes)


async def call(server: Gateway, rng: random.Random, known: Known) -> None:
    """One call that succeeds, and what `known` is after it."""
    client, name = server.client, rng.choice(NAMES)
    path, kind = f"/v1/sessions/{name}", rng.random()
    if name not in known:
        answer = await client.post("/v1/sessions", json={"id": name})
        known[name] = (0, ())
    elif kind < 0.05:
        answer = await client.delete(path)
        del known[name]
    elif kind < 0.15 and known[name][1]:
        stop = rng.randrange(1, len(known[name][1]) + 1)
        answer = await client.post(f"{path}/rewind", json={"to_position": stop})
        known[name] = (known[name][0] + 1, known[name][1][:stop])
    else:
        ids = [rng.randrange(1, 270) for _ in range(rng.choice((1, 5, 300)))]
        max_tokens = rng.randrange(1, 8)
        answer = await client.post(f"{path}/generate", json={"input": ids, "max_tokens": max_tokens})
        sampled = FakeBackend().script_ids[:max_tokens]
        known[name] = (known[name][0] + 1, (*known[name][1], *ids, *sampled))
    answer.raise_for_status()


if __name__ == "__main__":
    asyncio.run(live(Path(sys.argv[1]), num_calls=int(sys.argv[2]), seed=int(sys.argv[3])))
