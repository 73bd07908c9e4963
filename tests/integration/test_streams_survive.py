"""Two server processes on one Redis: the one that runs a turn is killed or stopped, its client reads on elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.counts import scaled
from tests.support.redis_servers import Topology
from tests.support.schemas import ANSWER, check_json
from tests.support.server_processes import Server, running
from tests.support.slow_steps import slow_steps

pytestmark = pytest.mark.redis
LEASE_S = 1.0
BODY: dict[str, Any] = {
    "input": "It was the best of times,",
    "max_tokens": 300,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
    "seed": 7,
}
SHELF = {"type": "array", "items": ANSWER, "minItems": 8, "maxItems": 8}  # some 300 tokens
LOST = (httpx.RemoteProtocolError, httpx.ReadError, httpx.ConnectError)


@dataclasses.dataclass
class Reader:
    """A client that keeps what it got, by number; a number that comes twice fails the test."""

    session_id: str
    body: dict[str, Any] = dataclasses.field(default_factory=lambda: BODY)
    frames: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)
    is_done: bool = False
    must_reconnect: bool = False
    news: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    @property
    def last(self) -> int:
        return max(self.frames, default=0)

    @property
    def text(self) -> str:
        frames = [self.frames[number] for number in sorted(self.frames)]
        return "".join(choice["text"] for frame in frames for choice in frame["choices"])

    @property
    def usage(self) -> dict[str, Any]:
        return dict(self.frames[self.last]["usage"])

    async def start(self, server: Server, *, frames: int | None = None) -> None:
        """The turn, or what is known of it; up to so many frames."""
        path, headers = f"/v1/sessions/{self.session_id}/generate", {"Idempotency-Key": "k"}
        async with server.client.stream("POST", path, json=self.body, headers=headers) as stream:
            await self._read(stream, frames)

    async def read_on(self, server: Server) -> None:
        """As an event source does; a client that never learnt its stream's id tries again."""
        self.must_reconnect = False
        if not self.frames:
            await self.start(server)
            return
        stream_id, headers = self.frames[self.last]["id"], {"Last-Event-ID": str(self.last)}
        async with server.client.stream("GET", f"/v1/streams/{stream_id}", headers=headers) as stream:
            await self._read(stream, None)

    async def wait_for(self, num_frames: int) -> None:
        while len(self.frames) < num_frames and not self.is_done:
            self.news.clear()
            await self.news.wait()

    async def _read(self, stream: httpx.Response, num_frames: int | None) -> None:
        assert stream.status_code == 200, await stream.aread()
        number = 0
        async for line in stream.aiter_lines():
            if line.startswith("id: "):
                number = int(line.removeprefix("id: "))
                assert number not in self.frames
            elif line == "data: [DONE]":
                self.is_done = not self.must_reconnect
            elif line.startswith("data: "):
                data = json.loads(line.removeprefix("data: "))
                if "error" in data:
                    assert data["error"]["code"] == "server_stopping", data
                    self.must_reconnect = True
                else:
                    self.frames[number] = data
            self.news.set()
            if num_frames is not None and len(self.frames) >= num_frames and line == "":
                return


@pytest.fixture
async def survivor(
    request: pytest.FixtureRequest, tmp_path: Path, redis_single: Topology
) -> AsyncIterator[tuple[Server, str]]:
    """A server that lives through the test, and the NSM_STORE it is on."""
    url, names = redis_single.own_url(), {"worker_settings", "server_settings"}
    settings = request.getfixturevalue((names & set(request.fixturenames)).pop())
    async with running(settings, tmp_path / "survivor", STORE=url, LEASE_S=LEASE_S) as server:
        yield server, url


async def unbroken(server: Server, body: dict[str, Any] = BODY) -> Reader:
    await server.create("unbroken")
    reader = Reader("unbroken", body)
    await reader.start(server)
    assert reader.is_done
    return reader


async def kill_after(victim: Server, reader: Reader, *, num_frames: int, pause_s: float = 0.0) -> None:
    """kill -9 once the client has so many frames of its turn, and not all."""
    await victim.create(reader.session_id)
    starting = asyncio.create_task(reader.start(victim))
    await reader.wait_for(num_frames)
    await asyncio.sleep(pause_s)
    victim.kill()
    with contextlib.suppress(*LOST):
        await starting
    await victim.process.wait()
    assert not reader.is_done


async def log_of(server: Server, session_id: str) -> dict[str, Any]:
    return dict((await server.client.get(f"/v1/sessions/{session_id}")).json())


async def test_R14_S10_kill_9_in_mid_stream_is_a_pause_for_the_client(
    server_settings: dict[str, object], tmp_path: Path, survivor: tuple[Server, str]
) -> None:
    server, url = survivor
    expected, rng = await unbroken(server), random.Random(3)
    for number in range(scaled(1, 100)):
        reader = Reader(f"killed{number}")
        async with running(server_settings, tmp_path / f"victim{number}", STORE=url, LEASE_S=LEASE_S) as victim:
            num_frames = rng.randrange(0, 150)  # as many tokens, or more, if a frame has several
            with slow_steps(after=num_frames):
                await kill_after(victim, reader, num_frames=num_frames, pause_s=rng.uniform(0.0, 0.05))
        await reader.read_on(server)
        assert reader.is_done
        assert (reader.text, reader.usage) == (expected.text, expected.usage)
        head = await log_of(server, reader.session_id)
        assert (head["version"], head["position"]) == (1, (await log_of(server, "unbroken"))["position"])
    metrics = (await server.client.get("/metrics")).text
    assert "nsm_turn_takeover_total 0.0" not in metrics


async def test_D8_a_holder_that_wakes_after_its_turn_was_taken_over_writes_nothing(
    worker_settings: dict[str, object], tmp_path: Path, survivor: tuple[Server, str]
) -> None:
    server, url = survivor
    expected = await unbroken(server)
    async with running(worker_settings, tmp_path / "sleeper", STORE=url, LEASE_S=LEASE_S) as sleeper:
        for number in range(scaled(1, 20)):
            reader = Reader(f"slept{number}")
            await sleeper.create(reader.session_id)
            with slow_steps():
                await reader.start(sleeper, frames=10)
                sleeper.suspend()
            try:
                await reader.read_on(server)
            finally:
                sleeper.resume()
            assert (reader.is_done, reader.text, reader.usage) == (True, expected.text, expected.usage)
            # a turn that still thought it had the session would commit, or write, within this time
            cancelled = (await sleeper.client.post(f"/v1/sessions/{reader.session_id}/cancel")).json()
            assert (cancelled["version"], cancelled["position"]) == (
                1,
                (await log_of(server, "unbroken"))["position"],
            )
            follow_up = await server.say(reader.session_id, " and then", max_tokens=4)
            assert follow_up["session"]["version"] == 2


async def test_R14_S10_a_server_that_is_started_again_goes_on_with_the_stream(
    server_settings: dict[str, object], tmp_path: Path
) -> None:
    """SQLite: the turn's record is in the file, and the store knows at once that its holder is gone."""
    reader = Reader("s")
    async with running(server_settings, tmp_path) as victim:
        expected = await unbroken(victim)
        with slow_steps(after=20):
            await kill_after(victim, reader, num_frames=20)
    async with running(server_settings, tmp_path) as server:
        await reader.read_on(server)
        assert (reader.is_done, reader.text, reader.usage) == (True, expected.text, expected.usage)
        retry = Reader("s")
        await retry.start(server)  # with the key of the first try
        assert retry.frames == reader.frames
        assert (await log_of(server, "s"))["version"] == 1


JSON_BODY = {name: value for name, value in BODY.items() if name != "ignore_eos"}
JSON_BODY |= {"guided_json": SHELF, "max_tokens": 2000}
JSON_BODY["stream_options"] = {"include_usage": True, "event_per_token": True}
NUM_JSON_KILLS = scaled(1, 100)  # of each of the two tests


async def reads_on_to(server: Server, reader: Reader, expected: Reader) -> None:
    """The rest of the answer: valid, and that of an undisturbed run."""
    num_before = len(reader.frames)
    await reader.read_on(server)
    assert reader.is_done
    assert reader.text == expected.text
    assert num_before < len(reader.frames)
    check_json(reader.text, SHELF)


async def test_kill_9_in_a_json_object_and_another_replica_goes_on_within_its_schema(
    worker_settings: dict[str, object], tmp_path: Path, survivor: tuple[Server, str]
) -> None:
    """The answer is valid, and that of an undisturbed run: the grammar follows the tokens that were written down."""
    server, url = survivor
    expected, rng = await unbroken(server, JSON_BODY), random.Random(5)
    check_json(expected.text, SHELF)
    for number in range(NUM_JSON_KILLS):
        reader = Reader(f"killed{number}", JSON_BODY)
        async with running(worker_settings, tmp_path / f"victim{number}", STORE=url, LEASE_S=LEASE_S) as victim:
            num_frames = rng.randrange(1, len(expected.frames) - 20)
            with slow_steps(after=num_frames):
                await kill_after(victim, reader, num_frames=num_frames)
        await reads_on_to(server, reader, expected)


async def test_kill_9_in_a_json_object_and_the_next_server_on_the_file_goes_on_within_its_schema(
    worker_settings: dict[str, object], tmp_path: Path
) -> None:
    """SQLite: each server reads the last one's answer on, and is killed in its own."""
    rng, expected, reader = random.Random(6), Reader("unbroken", JSON_BODY), None
    for number in range(NUM_JSON_KILLS + 1):
        async with running(worker_settings, tmp_path) as server:
            if reader is None:
                expected = await unbroken(server, JSON_BODY)
            else:
                await reads_on_to(server, reader, expected)
            if number < NUM_JSON_KILLS:
                reader = Reader(f"killed{number}", JSON_BODY)
                num_frames = rng.randrange(1, len(expected.frames) - 20)
                with slow_steps(after=num_frames):
                    await kill_after(server, reader, num_frames=num_frames)
