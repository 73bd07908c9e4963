"""Lives of sessions over HTTP, in any order of calls, with restarts and clock steps, against a model of a dozen lines.

On SQLite, whose store takes a clock, and on Redis: one server, a Sentinel pair and a cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import shutil
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from nsm_core.state.snapshot import Snapshot
from service.stores.redis.url import parse_redis_url
from service.stores.sessions.base import SessionStore
from service.stores.sessions.key import SessionKey
from service.stores.sessions.redis import RedisSessionStore
from service.stores.sessions.sqlite import SqliteSessionStore
from tests.support.counts import scaled
from tests.support.fakes import FakeBackend, state_after
from tests.support.gateway import FILE_HEADERS, Gateway, error_of, gateway
from tests.support.redis_servers import Topology, own_prefix

Result = TypeVar("Result")

NAMES = ("s1", "s2", "s3", "s4")
EVERY_TOKEN = 1_000  # more than the fake has to say: it stops by itself

names = st.sampled_from(NAMES)
tokens = st.integers(1, 270)  # of the fake's vocabulary
inputs = st.lists(tokens, max_size=4) | st.just([7] * 300)  # as long as it takes to keep a snapshot
lengths = st.integers(1, 6) | st.just(EVERY_TOKEN)
fractions = st.floats(0.0, 1.0)
# Seconds that the clock is off. No two of them are as far apart as a turn's result is stored (a day).
offsets = st.integers(-40_000, 40_000) | st.sampled_from((-11, 0, 11))  # a lease has 10 s


@dataclasses.dataclass(slots=True)
class Known:
    """What a session must be. `ends`: where the log ended at each version that can still be gone back to."""

    version: int = 0
    log: tuple[int, ...] = ()
    has_pending: bool = False
    ends: dict[int, int] = dataclasses.field(default_factory=lambda: {0: 0})
    metadata: dict[str, str] = dataclasses.field(default_factory=dict)
    forked_from: str | None = None

    @property
    def position(self) -> int:
        return len(self.log) - self.has_pending

    def move(self, log: tuple[int, ...], *, has_pending: bool) -> None:
        self.version += 1
        self.log, self.has_pending = log, has_pending
        self.ends = {version: end for version, end in self.ends.items() if end <= len(log)}
        self.ends[self.version] = len(log)


class SessionMachine(RuleBasedStateMachine):
    """Each rule is a call and what it must answer; the invariant looks at all that is stored."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.directory = Path(tempfile.mkdtemp())
        self.known: dict[str, Known] = {}
        self.keys = itertools.count()
        self.last: tuple[str, dict[str, Any], str, dict[str, Any]] | None = None
        self.clock_offset_s = 0

    def make_store(self) -> SessionStore:
        """The same sessions each time."""
        return SqliteSessionStore(self.directory / "sessions.db", clock=lambda: time.time() + self.clock_offset_s)

    @initialize(is_exact=st.booleans(), limit=st.sampled_from((0, 8, 10**6)), cache_mb=st.sampled_from((0, 1)))
    def begin(self, is_exact: bool, limit: int, cache_mb: int) -> None:
        """States are stored with each turn, past a limit, or not at all, and wait in memory or do not."""
        self.is_exact, self.policy = is_exact, {"snapshot_tokens": limit, "state_cache_mb": cache_mb}
        self.start()

    def start(self) -> None:
        self.stack = contextlib.AsyncExitStack()
        self.backend = FakeBackend(replays_exactly=self.is_exact)
        opened = gateway(self.backend, store=self.make_store(), **self.policy)
        self.server: Gateway = self.run(self.stack.enter_async_context(opened))

    def teardown(self) -> None:
        if hasattr(self, "stack"):
            self.run(self.stack.aclose())
        self.runner.close()
        shutil.rmtree(self.directory)

    @rule()
    def restart(self) -> None:
        self.run(self.stack.aclose())
        self.start()

    @rule(offset_s=offsets)
    def step_the_clock(self, offset_s: int) -> None:
        self.clock_offset_s = offset_s

    @rule(name=names, ids=st.lists(tokens, min_size=1, max_size=3), offset_s=offsets)
    def step_the_clock_while_a_turn_runs(self, name: str, ids: list[int], offset_s: int) -> None:
        """Its lease runs out by that clock, or will not for hours; nobody else wants it."""
        if name not in self.known:
            return

        async def work() -> httpx.Response:
            self.backend.hold_on()
            self.backend.release(1)
            body = {"input": ids, "max_tokens": 6}
            turn = asyncio.create_task(self.server.client.post(f"/v1/sessions/{name}/generate", json=body))
            held = asyncio.create_task(self.backend.held.wait())
            await asyncio.wait((turn, held), return_when=asyncio.FIRST_COMPLETED)
            assert not turn.done(), turn.result().text
            self.clock_offset_s = offset_s
            self.backend.release_all()
            self.backend.forget_permits()
            return await turn

        self.last = None
        self.expect_turn(self.known[name], ids, 6, self.run(work()))

    @rule(name=names)
    def create(self, name: str) -> None:
        response = self.call("POST", "/v1/sessions", json={"id": name})
        if name in self.known:
            assert failure(response) == (409, "version_conflict")
            return
        assert response.status_code == 200
        self.known[name] = Known()

    @rule(name=names, ids=inputs, max_tokens=lengths, version=st.sampled_from(("none", "right", "wrong")))
    def generate(self, name: str, ids: list[int], max_tokens: int, version: str) -> None:
        known, key = self.known.get(name), f"key-{next(self.keys)}"
        body: dict[str, Any] = {"input": ids, "max_tokens": max_tokens}
        if known is not None and version != "none":
            body["expected_version"] = known.version + (version == "wrong")
        response = self.generate_call(name, body, key)
        if known is None:
            assert failure(response) == (404, "session_not_found")
        elif "expected_version" in body and version == "wrong":
            assert failure(response) == (409, "version_conflict")
        elif not ids and not known.has_pending:
            assert failure(response)[0] == 400
        else:
            self.expect_turn(known, ids, max_tokens, response)
            self.last = (name, body, key, response.json())

    def expect_turn(self, known: Known, ids: list[int], max_tokens: int, response: httpx.Response) -> None:
        assert response.status_code == 200, response.text
        body = response.json()
        usage, read = body["usage"], known.has_pending + len(ids)
        assert usage["prompt_tokens"] == known.position + read
        assert sum(usage["prompt_tokens_details"].values()) == known.position  # covered by a state, or read again
        script = self.backend.script_ids[:-1]
        is_stop = max_tokens > len(script)
        known.move((*known.log, *ids, *script[:max_tokens]), has_pending=not is_stop)
        assert body["choices"][0]["finish_reason"] == ("stop" if is_stop else "length")
        point = {"version": known.version, "position": known.position}
        assert {name: body["session"][name] for name in point} == point

    @precondition(lambda self: self.last is not None and self.last[0] in self.known)
    @rule()
    def D9_send_the_last_turn_again(self) -> None:
        assert self.last is not None
        name, body, key, answer = self.last
        num_requests = len(self.backend.requests)
        again = self.generate_call(name, body, key)
        assert again.status_code == 200, again.text
        assert again.json()["choices"] == answer["choices"]
        assert again.json()["session"] == answer["session"]
        assert failure(self.generate_call(name, {**body, "max_tokens": 7}, key))[0] == 422
        assert len(self.backend.requests) == num_requests

    @rule(name=names, ids=st.lists(tokens, min_size=1, max_size=3), num_tokens=st.integers(0, 3))
    def S8_cancel_a_running_turn(self, name: str, ids: list[int], num_tokens: int) -> None:
        if name not in self.known:
            return

        async def work() -> tuple[httpx.Response, httpx.Response]:
            self.backend.hold_on()
            self.backend.release(num_tokens)
            body = {"input": ids, "max_tokens": 6}
            turn = asyncio.create_task(self.server.client.post(f"/v1/sessions/{name}/generate", json=body))
            held = asyncio.create_task(self.backend.held.wait())
            await asyncio.wait((turn, held), return_when=asyncio.FIRST_COMPLETED)
            assert not turn.done(), turn.result().text
            busy = await self.server.client.post(f"/v1/sessions/{name}/generate", json=body)
            assert failure(busy) == (409, "session_busy")
            answer = await self.server.client.post(f"/v1/sessions/{name}/cancel")
            self.backend.release_all()
            self.backend.forget_permits()
            return answer, await turn

        self.last = None
        answer, turn = self.run(work())
        assert answer.json()["cancelled"] is True
        assert failure(turn)[1] == "turn_cancelled"

    @rule(name=names)
    def cancel_what_does_not_run(self, name: str) -> None:
        response = self.call("POST", f"/v1/sessions/{name}/cancel")
        if name in self.known:
            assert response.json()["cancelled"] is False
        else:
            assert failure(response) == (404, "session_not_found")

    @rule(name=names, new=names)
    def fork(self, name: str, new: str) -> None:
        response = self.call("POST", f"/v1/sessions/{name}/fork", json={"id": new})
        known = self.known.get(name)
        if known is None:
            assert failure(response) == (404, "session_not_found")
        elif new in self.known:
            assert failure(response) == (409, "version_conflict")
        else:
            origin = f"{name}@{known.position}"
            self.known[new] = dataclasses.replace(known, ends=dict(known.ends), forked_from=origin)

    @rule(name=names, fraction=fractions, is_to_version=st.booleans())
    def rewind(self, name: str, fraction: float, is_to_version: bool) -> None:
        known = self.known.get(name)
        if known is None:
            response = self.call("POST", f"/v1/sessions/{name}/rewind", json={"to_position": 0})
            assert failure(response) == (404, "session_not_found")
            return
        versions = sorted(known.ends)
        version = versions[round(fraction * (len(versions) - 1))]
        position = known.ends[version] if is_to_version else round(fraction * len(known.log))
        body = {"to_version": version} if is_to_version else {"to_position": position}
        response = self.call("POST", f"/v1/sessions/{name}/rewind", json=body)
        assert response.status_code == 200, response.text
        known.move(known.log[:position], has_pending=position > 1)
        self.forget_last(name)

    @rule(name=names, fraction=fractions)
    def rewind_to_where_it_never_was(self, name: str, fraction: float) -> None:
        known = self.known.get(name, Known())
        body = {"to_position": len(known.log) + 1 + round(9 * fraction)}
        response = self.call("POST", f"/v1/sessions/{name}/rewind", json=body)
        assert failure(response)[0] == (400 if name in self.known else 404)

    @rule(name=names, value=st.text("abc", max_size=3))
    def patch(self, name: str, value: str) -> None:
        response = self.call("PATCH", f"/v1/sessions/{name}", json={"metadata": {"k": value}})
        if name in self.known:
            self.known[name].metadata = {"k": value}
        else:
            assert failure(response) == (404, "session_not_found")

    @rule(name=names, new=names)
    def move_by_file(self, name: str, new: str) -> None:
        file = self.call("GET", f"/v1/sessions/{name}/export")
        if name not in self.known:
            assert failure(file) == (404, "session_not_found")
            return
        response = self.call(
            "POST", "/v1/sessions/import", params={"id": new}, content=file.content, headers=FILE_HEADERS
        )
        if new in self.known:
            assert failure(response) == (409, "version_conflict")
        else:
            assert response.status_code == 200, response.text
            known = self.known[name]
            self.known[new] = dataclasses.replace(known, ends=dict(known.ends))

    @rule(name=names)
    def delete(self, name: str) -> None:
        response = self.call("DELETE", f"/v1/sessions/{name}")
        if self.known.pop(name, None) is None:
            assert failure(response) == (404, "session_not_found")
        else:
            assert response.status_code == 200
        self.forget_last(name)

    @invariant()
    def all_is_as_it_must_be(self) -> None:
        if hasattr(self, "server"):
            self.run(self.compare())

    async def compare(self) -> None:
        store = self.server.services.store
        listed = (await self.server.client.get("/v1/sessions")).json()["data"]
        assert {session["id"] for session in listed} == set(self.known)
        for session in listed:
            known, key = self.known[session["id"]], SessionKey("default", session["id"])
            found = (session["version"], session["position"], session["metadata"], session["forked_from"])
            assert found == (known.version, known.position, known.metadata, known.forked_from)
            assert await store.read_log(key) == known.log
            stored = await store.load(key)
            if stored.snapshot is None:
                assert known.log == () or self.is_exact
                continue
            snapshot = Snapshot.decode(stored.snapshot)
            position = snapshot.header.position
            assert (position == known.position) or self.is_exact
            assert snapshot.state == state_after(known.log[:position])
            assert snapshot.header.pending_id in (None, known.log[min(position, len(known.log) - 1)])
            for retained in await store.list_retained(key):
                older = await store.load_retained(key, version=retained.version)
                assert older is not None
                assert Snapshot.decode(older).state == state_after(known.log[: retained.position])

    def forget_last(self, name: str) -> None:
        if self.last is not None and self.last[0] == name:
            self.last = None

    def generate_call(self, name: str, body: dict[str, Any], key: str) -> httpx.Response:
        return self.call("POST", f"/v1/sessions/{name}/generate", json=body, headers={"Idempotency-Key": key})

    def call(self, method: str, path: str, **fields: Any) -> httpx.Response:
        return self.run(self.server.client.request(method, path, **fields))

    def run(self, work: Awaitable[Result]) -> Result:
        async def awaited() -> Result:
            return await work

        return self.runner.run(awaited())


def failure(response: httpx.Response) -> tuple[int, str | None]:
    return response.status_code, error_of(response)["code"]


SessionMachine.TestCase.settings = settings(
    max_examples=scaled(8, 200),
    stateful_step_count=scaled(20, 60),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestSessionMachine = SessionMachine.TestCase


REDIS_SETTINGS = settings(
    max_examples=scaled(3, 100),
    stateful_step_count=scaled(15, 50),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.redis
@pytest.mark.parametrize("kind", ["single", "sentinel", "cluster"])
def test_lives_on_redis_are_those_of_the_model(kind: str, request: pytest.FixtureRequest) -> None:
    servers: Topology = request.getfixturevalue(f"redis_{kind}")

    class RedisMachine(SessionMachine):
        def __init__(self) -> None:
            super().__init__()
            self.prefix = own_prefix()

        def make_store(self) -> SessionStore:
            return RedisSessionStore(parse_redis_url(servers.url_with(prefix=self.prefix)))

    run_state_machine_as_test(RedisMachine, settings=REDIS_SETTINGS)
