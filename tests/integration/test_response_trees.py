"""Random trees of responses against plain Python: each answer stands on exactly the ids that its place says.

The fake's state is a hash over all that was read: one token lost, repeated or taken from another branch would show.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from service.stores.sessions.sqlite import SqliteSessionStore
from tests.support.counts import scaled
from tests.support.fakes import STATE_BYTES, FakeBackend, feed_state, state_after
from tests.support.gateway import Gateway, gateway
from tests.support.responses import PATH, counts_of, respond, session_ids

SCRIPT = " It was the worst of times"
RULES = (None, None, "Be brief.", "Rhyme.")
NUM_STEPS = 40


@dataclasses.dataclass(frozen=True)
class Node:
    """A stored response: what the next one inherits."""

    response_id: str | None
    chain: tuple[int, ...]


@pytest.fixture(params=["alone", "two replicas"])
async def servers(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[Gateway, ...]]:
    async with contextlib.AsyncExitStack() as stack:
        if request.param == "alone":
            yield (await stack.enter_async_context(gateway(FakeBackend(SCRIPT))),)
            return
        stores = [SqliteSessionStore(tmp_path / "sessions.db") for _ in range(2)]
        made = [gateway(FakeBackend(SCRIPT), store=store) for store in stores]
        yield tuple([await stack.enter_async_context(server) for server in made])


def read_state(backend: FakeBackend) -> bytes:
    """The state after the newest request's prompt."""
    request = backend.requests[-1]
    before = request.resume.state if request.resume else bytes(STATE_BYTES)
    return feed_state(before, request.prompt_ids)


async def add_response(server: Gateway, rng: random.Random, parent: Node, number: int) -> Node:
    """A response after `parent`, checked."""
    backend, encode = server.services.backend, server.services.backend.tokenizer.encode
    assert isinstance(backend, FakeBackend)
    rules, num_tokens, is_retained = rng.choice(RULES), rng.choice([2, 100]), rng.random() < 0.8
    response = await respond(
        server,
        f"{number}",
        previous_response_id=parent.response_id,
        instructions=rules,
        max_output_tokens=num_tokens,
        store=is_retained,
    )
    read = (*parent.chain, *encode("\n\n" * (len(parent.chain) > 1) + f"User: {number}\n\nAssistant:"))
    context = (read[0], *(encode(f"{rules}\n\n") if rules else ()), *read[1:])
    assert read_state(backend) == state_after(context)
    assert counts_of(response)[0] == len(context)
    return Node(response["id"], (*read, *encode(SCRIPT)[:num_tokens])) if is_retained else parent


@pytest.mark.parametrize("seed", range(scaled(2, 60)))
async def test_each_response_stands_on_its_own_branch(seed: int, servers: tuple[Gateway, ...]) -> None:
    rng = random.Random(seed)
    root = Node(None, (0,))
    nodes = [root]
    for number in range(NUM_STEPS):
        server = rng.choice(servers)
        if rng.random() < 0.15 and len(nodes) > 1:
            gone = nodes.pop(rng.randrange(1, len(nodes)))
            assert (await server.client.delete(f"{PATH}/{gone.response_id}")).status_code == 200
            continue
        parent = nodes[-1] if rng.random() < 0.5 else rng.choice(nodes)
        made = await add_response(server, rng, parent, number)
        if made is not parent:
            nodes.append(made)
    for node in nodes[1:]:
        server = rng.choice(servers)
        assert (await server.client.delete(f"{PATH}/{node.response_id}")).status_code == 200
    assert await session_ids(server) == []
