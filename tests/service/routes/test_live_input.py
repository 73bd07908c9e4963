"""POST …/append with a body that comes bit by bit: what is read, what is kept, and what a retry adds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from nsm_core.errors import StorageFull, StoreUnavailable
from service.live_input import pieces, reading
from service.routes import live_input
from service.stores.sessions.base import Commit, SessionHead
from service.stores.sessions.key import SessionKey
from service.tenants.rate_limit import Allowance
from service.turns.lease import HeldLease
from service.web import live_body
from tests.support.fakes import FakeBackend, state_after
from tests.support.gateway import Gateway, error_of, gateway, until
from tests.support.tenants import keyed, make_key

KEY = SessionKey("default", "s1")
PATH = "/v1/sessions/s1/append"
LINES = {"content-type": "application/x-ndjson"}
TEXT = {"content-type": "text/plain; charset=utf-8"}
WORDS = ["It was the best", " of times, — ünd", " the worst", " of times.\n"]
BODY = b"".join(json.dumps({"text": word}, ensure_ascii=False).encode() + b"\n" for word in WORDS)


@pytest.fixture
async def server() -> AsyncIterator[Gateway]:
    async with gateway(FakeBackend(), retained_snapshots=4) as made:
        await create(made)
        yield made


async def create(server: Gateway, **headers: str) -> None:
    response = await server.client.post("/v1/sessions", json={"id": "s1"}, headers=headers)
    assert response.status_code == 200, response.text


async def sent(parts: Iterable[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def append(server: Gateway, *parts: bytes, path: str = PATH, **headers: str) -> httpx.Response:
    return await server.client.post(path, content=sent(parts), headers={**LINES, **headers})


async def ok(server: Gateway, *parts: bytes, path: str = PATH, **headers: str) -> dict[str, Any]:
    response = await append(server, *parts, path=path, **headers)
    assert response.status_code == 200, response.text
    return dict(response.json())


async def log_of(server: Gateway, key: SessionKey = KEY) -> tuple[int, ...]:
    return await server.services.store.read_log(key)


async def version_of(server: Gateway) -> int:
    return (await server.services.store.get(KEY)).version


def log_after(server: Gateway, words: Sequence[str]) -> tuple[int, ...]:
    """What a session has read after these texts, each encoded for itself."""
    tokenizer = server.services.backend.tokenizer
    return (tokenizer.end_of_text_id, *(token_id for word in words for token_id in tokenizer.encode(word)))


def split(body: bytes, size: int) -> list[bytes]:
    return [body[start : start + size] for start in range(0, len(body), size)]


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_lines_are_read_alike_however_the_network_splits_them(server: Gateway, size: int) -> None:
    answer = await ok(server, *split(BODY, size))
    log = log_after(server, WORDS)
    assert await log_of(server) == log
    assert (answer["mark"], answer["num_appended"], answer["num_bytes_read"]) == (0, len(log), len(BODY))
    assert answer["version"] == await version_of(server)
    assert answer["version"] == (1 if size == 1000 else len(WORDS))
    cleared = await server.client.post("/v1/sessions/s1/clear", json={"mark": answer["mark"]})
    assert (cleared.status_code, await log_of(server)) == (200, ())


@pytest.mark.parametrize("size", [1, 5, 4096])
async def test_plain_text_is_cut_before_blanks_and_not_where_the_network_does(
    server: Gateway, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PIECE_CHARS", 16)
    text = "It was — the best of times, ünd it was the worst " + "x" * 40
    answer = await ok(server, *split(text.encode(), size), **TEXT)
    cut = ["It was — the", " best of times,", " ünd it was the", " worst", " " + "x" * 15, "x" * 16, "x" * 9]
    assert await log_of(server) == log_after(server, cut)
    assert answer["num_bytes_read"] == len(text.encode())


async def test_a_turn_after_live_input_starts_from_all_of_it(server: Gateway) -> None:
    await ok(server, *split(BODY, 9))
    response = await server.client.post("/v1/sessions/s1/generate", json={"input": " Who?", "max_tokens": 2})
    assert response.status_code == 200, response.text
    log = await log_of(server)
    hot = server.services.turns.keeper
    assert response.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == len(log_after(server, WORDS))
    snapshot = await hot.find(KEY)
    assert snapshot is not None
    assert snapshot.snapshot.state == state_after(log[:-1])


async def test_commits_have_a_largest_size(server: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "COMMIT_TOKENS", 1)
    assert (await ok(server, BODY))["version"] == len(WORDS)
    assert await log_of(server) == log_after(server, WORDS)


@pytest.mark.parametrize(
    ("line", "param", "message"),
    [
        (b'{"text": 5}', "text", "line 3: text must be a string, got 5"),
        (b"{}", "text", "line 3: text must be a string, got null"),
        (b'{"text": "a", "role": "user"}', "role", "line 3: 'role' is not known"),
        (b"[1]", "text", "line 3 must be an object"),
        (b'{"text"', None, "line 3: the body is not valid JSON"),
        (b'{"text": "' + b"a" * pieces.MAX_LINE_BYTES, "text", "line 3 must have at most 32768 bytes"),
    ],
)
async def test_a_line_that_cannot_be_is_named_and_those_before_it_stay(
    server: Gateway, line: bytes, param: str | None, message: str
) -> None:
    before = b'{"text": "one"}\n\n'
    response = await append(server, before + line + b"\n")
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, param)
    assert message in error["message"]
    assert f"{len(before)} bytes of the body are read and committed, up to version 1" in error["message"]
    assert await log_of(server) == log_after(server, ["one"])


@pytest.mark.parametrize("parts", [[b"ab \xff cd"], [b"ab ", b"\xc3"], [b"ab\xc3", b"("]])
async def test_plain_text_that_is_no_utf8_is_refused_with_its_position(server: Gateway, parts: list[bytes]) -> None:
    response = await append(server, *parts, **TEXT)
    position = {b"ab \xff cd": 3, b"ab ": 3, b"ab\xc3": 2}[parts[0]]
    assert (response.status_code, error_of(response)["param"]) == (400, "body")
    assert f"at byte {position}; nothing was read" in error_of(response)["message"]
    assert await version_of(server) == 0


@pytest.mark.parametrize("body", [b"", b"\n \n", b'{"text": ""}\n'])
async def test_a_body_without_text_is_refused(server: Gateway, body: bytes) -> None:
    response = await append(server, body)
    assert (response.status_code, error_of(response)["param"]) == (400, "body")


async def test_charsets_encodings_and_queries_are_checked(server: Gateway) -> None:
    latin = await append(server, b"a", **{"content-type": "text/plain; charset=latin-1"})
    packed = await append(server, b"a", **{"content-encoding": "gzip"})
    other = await append(server, BODY, path=f"{PATH}?version=1")
    assert [one.status_code for one in (latin, packed, other)] == [415, 415, 400]
    form = await append(server, b"a", **{"content-type": "application/x-www-form-urlencoded"})
    allowed = "application/json, application/x-ndjson or text/plain, got application/x-www-form-urlencoded"
    assert (form.status_code, error_of(form)["message"]) == (415, f"the Content-Type must be {allowed}")
    missing = await append(server, BODY, path="/v1/sessions/s2/append")
    assert error_of(missing)["code"] == "session_not_found"


async def test_another_version_is_a_conflict_before_anything_is_read(server: Gateway) -> None:
    response = await append(server, BODY, path=f"{PATH}?expected_version=3")
    assert (response.status_code, error_of(response)["code"]) == (409, "version_conflict")
    assert await version_of(server) == 0
    assert (await ok(server, BODY, path=f"{PATH}?expected_version=0"))["version"] == 1


async def test_the_body_is_bounded_and_what_came_before_stays() -> None:
    async with gateway(FakeBackend(), max_body_bytes=64) as server:
        await create(server)
        response = await append(server, b'{"text": "one"}\n', BODY)
        assert (response.status_code, error_of(response)["code"]) == (413, "body_too_large")
        assert "16 bytes of the body are read and committed" in error_of(response)["message"]
        assert await log_of(server) == log_after(server, ["one"])


async def test_open_bodies_are_limited(server: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_input, "MAX_OPEN", 0)
    assert (await append(server, BODY)).status_code == 503


async def test_a_retry_with_the_key_reads_nothing_twice(server: Gateway) -> None:
    key = {"idempotency-key": "k1"}
    first = await append(server, *split(BODY, 20), **key)
    again = await append(server, *split(BODY, 33), **key)
    assert again.json() == first.json()
    assert "idempotent-replayed" not in first.headers
    assert again.headers["idempotent-replayed"] == "true"
    assert await log_of(server) == log_after(server, WORDS)


@pytest.mark.parametrize("num_lines", [1, 2, 3])
async def test_a_retry_goes_on_where_the_first_try_broke_off(server: Gateway, num_lines: int) -> None:
    """A bad line stands for whatever ended the first try: the one before it was committed."""
    key = {"idempotency-key": "k1"}
    lines = BODY.splitlines(keepends=True)
    broken = await append(server, *lines[:num_lines], b"?\n", **key)
    assert broken.status_code == 400
    answer = await ok(server, *split(BODY, 11), **key)
    assert await log_of(server) == log_after(server, WORDS)
    assert (answer["mark"], answer["num_appended"]) == (0, len(log_after(server, WORDS)))


@pytest.mark.parametrize("is_written", [False, True], ids=["before the commit", "after the commit"])
@pytest.mark.parametrize("number", [1, 2, 3, 4])
async def test_a_retry_after_a_lost_commit_adds_what_is_missing(
    server: Gateway, monkeypatch: pytest.MonkeyPatch, number: int, is_written: bool
) -> None:
    """`number`: of the commit that fails, or whose answer is lost."""
    commit, calls = HeldLease.commit, []

    async def lost(held: HeldLease, change: Commit) -> SessionHead:
        calls.append(change)
        if len(calls) == number and not is_written:
            raise StorageFull("no room")
        head = await commit(held, change)
        if len(calls) == number:
            raise StoreUnavailable("the answer was lost")
        return head

    monkeypatch.setattr(HeldLease, "commit", lost)
    key = {"idempotency-key": "k1"}
    lines = BODY.splitlines(keepends=True)
    first = await append(server, *lines, **key)
    assert first.status_code == (503 if is_written else 507)
    assert await version_of(server) == (number if is_written else number - 1)
    answer = await ok(server, *lines, **key)
    assert await log_of(server) == log_after(server, WORDS)
    assert (answer["mark"], answer["num_appended"]) == (0, len(log_after(server, WORDS)))


async def test_a_long_body_keeps_two_records_and_leaves_those_of_turns(server: Gateway) -> None:
    asked = {"input": "one", "max_tokens": 1}
    turn = await server.client.post("/v1/sessions/s1/generate", json=asked, headers={"idempotency-key": "turn"})
    lines = [b'{"text": "w%d "}\n' % number for number in range(40)]
    key = {"idempotency-key": "k1"}
    assert (await append(server, *lines[:30], b"?\n", **key)).status_code == 400
    assert (await ok(server, *lines, **key))["version"] == 41
    assert (await log_of(server))[-5:] == log_after(server, [f"w{number} " for number in range(40)])[-5:]
    again = await server.client.post("/v1/sessions/s1/generate", json=asked, headers={"idempotency-key": "turn"})
    assert again.json() == turn.json()


@pytest.mark.parametrize("body", [b'{"text": "another"}\n', BODY.splitlines(keepends=True)[0], b'{"text":"' + BODY])
async def test_another_body_under_the_key_is_refused(server: Gateway, body: bytes) -> None:
    key = {"idempotency-key": "k1"}
    await ok(server, *split(BODY, 20), **key)
    response = await append(server, body, **key)
    assert response.status_code in (400, 422)
    assert await log_of(server) == log_after(server, WORDS)


async def test_a_turn_in_between_makes_the_rest_a_conflict() -> None:
    async with gateway(FakeBackend(), is_live=True) as server:
        await create(server)
        asked = asyncio.Event()

        async def parts() -> AsyncIterator[bytes]:
            yield b'{"text": "one"}\n'
            await asked.wait()
            yield b'{"text": "two"}\n'

        request = asyncio.create_task(server.client.post(PATH, content=parts(), headers=LINES))
        await until_version(server, 1)
        turn = await server.client.post("/v1/sessions/s1/generate", json={"input": " x", "max_tokens": 1})
        assert turn.status_code == 200  # the lease is free between two commits
        log = await log_of(server)
        asked.set()
        response = await request
        assert (response.status_code, error_of(response)["code"]) == (409, "version_conflict")
        assert "16 bytes of the body are read and committed, up to version 1" in error_of(response)["message"]
        assert await log_of(server) == log


async def until_version(server: Gateway, version: int) -> None:
    async with asyncio.timeout(60):
        while await version_of(server) < version:  # noqa: ASYNC110  # nothing tells
            await asyncio.sleep(0.001)


async def raw_connection(server: Gateway, *headers: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = server.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    lines = [f"POST {PATH} HTTP/1.1", f"host: {host}", "transfer-encoding: chunked", *headers]
    writer.write("\r\n".join([*lines, "", ""]).encode())
    return reader, writer


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def test_a_client_that_is_lost_in_mid_line_keeps_whole_lines_and_its_retry_the_rest() -> None:
    async with gateway(FakeBackend(), is_live=True) as server:
        await create(server)
        lines = BODY.splitlines(keepends=True)
        _, writer = await raw_connection(server, "content-type: application/x-ndjson", "idempotency-key: k1")
        writer.write(chunk(lines[0]))
        await until_version(server, 1)
        writer.write(chunk(lines[1] + lines[2][:14]))
        await until_version(server, 2)
        writer.transport.abort()
        await until(lambda: not live_input._open)
        assert await log_of(server) == log_after(server, WORDS[:2])
        answer = await ok(server, BODY, **{"idempotency-key": "k1"})
        assert await log_of(server) == log_after(server, WORDS)
        assert answer["num_bytes_read"] == len(BODY)


async def test_a_client_that_is_faster_than_the_engine_has_to_wait() -> None:
    backend = FakeBackend(hold=True)
    async with gateway(backend, is_live=True, max_body_bytes=2**30) as server:
        await create(server)
        _, writer = await raw_connection(server, "content-type: application/x-ndjson")
        writer.write(chunk(b'{"text": "one"}\n'))
        await backend.held.wait()
        line = chunk(b'{"text": ""' + b" " * 24_000 + b"}\n")
        num_sent = 0
        for _ in range(2000):  # 48 MB, far more than buffers of sockets hold
            writer.write(line)
            try:
                async with asyncio.timeout(0.2):
                    await writer.drain()
            except TimeoutError:
                break
            num_sent += 1
        assert num_sent < 1999
        writer.transport.abort()
        backend.release_all()
        await until(lambda: not live_input._open)


async def test_a_body_that_stops_is_ended_and_what_it_brought_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_input, "read_live", _impatient)
    async with gateway(FakeBackend(), is_live=True) as server:
        await create(server)
        reader, writer = await raw_connection(server, "content-type: application/x-ndjson")
        writer.write(chunk(b'{"text": "one"}\n'))
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        assert b"connection: close" in head.lower()
        assert b"16 bytes of the body are read and committed, up to version 1" in await reader.read()
        writer.close()
        assert await log_of(server) == log_after(server, ["one"])


def _impatient(receive: Any, **options: Any) -> AsyncIterator[bytes]:
    return live_body.read_live(receive, **options, idle_s=1.0)


async def test_a_server_that_stops_ends_an_idle_body_and_tells_what_it_has() -> None:
    async with gateway(FakeBackend(), is_live=True) as server:
        await create(server)
        reader, writer = await raw_connection(server, "content-type: application/x-ndjson")
        writer.write(chunk(b'{"text": "one"}\n'))
        await until_version(server, 1)
        server.services.lifecycle.begin_drain()
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 503 ")
        writer.close()
        assert await log_of(server) == log_after(server, ["one"])


async def test_each_commit_but_the_first_counts_as_a_request_and_waits_for_its_turn(
    server: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    take = server.services.tenants.take

    def take_slowly(tenant: str) -> Allowance | None:
        """Every other time there is none left."""
        asked.append(len(asked))
        left = Allowance(per_s=1, limit=1, remaining=0, reset_s=0, retry_after_s=0.001 if len(asked) % 2 else None)
        return left if len(asked) > 1 else take(tenant)  # the HTTP request's own

    monkeypatch.setattr(server.services.tenants, "take", take_slowly)
    answer = await ok(server, *BODY.splitlines(keepends=True))
    assert answer["version"] == len(WORDS)
    assert len(asked) == 1 + 1 + 2 + 2  # the request, and three commits of which two had to ask again
    assert await log_of(server) == log_after(server, WORDS)


async def test_a_tenant_with_too_many_requests_at_the_engine_is_refused(tmp_path: Path) -> None:
    key, backend = make_key("acme"), FakeBackend(hold=True)
    async with keyed(tmp_path / "keys.toml", key, backend=backend, is_live=True, acme="max_concurrent = 1") as server:
        await create(server, **key.headers)
        busy = {"prompt": "x", "max_tokens": 1}
        first = asyncio.create_task(server.client.post("/v1/completions", json=busy, headers=key.headers))
        await backend.held.wait()
        response = await append(server, BODY, **key.headers)
        assert (response.status_code, error_of(response)["code"]) == (429, "concurrency_limit_exceeded")
        assert error_of(response)["message"].endswith("nothing was read")
        backend.release_all()
        assert (await first).status_code == 200


async def test_the_description_names_the_bodies(server: Gateway) -> None:
    operation = server.app.openapi()["paths"]["/v1/sessions/{session_id}/append"]["post"]
    assert set(operation["requestBody"]["content"]) == {
        "application/json",
        *map(str, (live_body.LINES, live_body.TEXT)),
    }
    assert "expected_version" in {one["name"] for one in operation["parameters"]}
