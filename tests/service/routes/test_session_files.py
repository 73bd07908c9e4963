"""Export and import over HTTP, between two installations."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from nsm_core.hashing import CHECKSUM_BYTES, checksum
from nsm_core.state.snapshot import Snapshot
from nsm_core.tokenizer import BpeTokenizer
from service.stores.sessions.key import SessionKey
from tests.support.fakes import FakeBackend, state_after
from tests.support.gateway import FILE_HEADERS, Gateway, error_of, gateway

KEY = SessionKey("default", "s1")
PREFIX = struct.Struct("<8sIIQQ")


@contextlib.asynccontextmanager
async def two_servers(there: FakeBackend | None = None) -> AsyncIterator[tuple[Gateway, Gateway]]:
    """A session "s1" of two turns in the first."""
    async with gateway(FakeBackend()) as one, gateway(there or FakeBackend()) as two:
        body = {"id": "s1", "metadata": {"k": "v"}, "ttl_s": 60}
        ok(await one.client.post("/v1/sessions", json=body))
        for text in ("one", "two"):
            await say(one, text)
        yield one, two


def ok(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    return dict(response.json())


async def say(server: Gateway, text: str, session_id: str = "s1") -> dict[str, Any]:
    body = {"input": text, "max_tokens": 4}
    return ok(await server.client.post(f"/v1/sessions/{session_id}/generate", json=body))


async def export(server: Gateway) -> bytes:
    response = await server.client.get("/v1/sessions/s1/export")
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/octet-stream"
    assert response.headers["content-disposition"] == 'attachment; filename="s1.nsm-session"'
    return response.content


async def import_(server: Gateway, raw: bytes, **query: Any) -> httpx.Response:
    return await server.client.post("/v1/sessions/import", content=raw, params=query, headers=FILE_HEADERS)


async def head_of(server: Gateway) -> dict[str, Any]:
    return ok(await server.client.get("/v1/sessions/s1"))


async def state_of(server: Gateway) -> tuple[Snapshot, tuple[int, ...]]:
    stored = await server.services.store.load(KEY)
    assert stored.snapshot is not None
    return Snapshot.decode(stored.snapshot), await server.services.store.read_log(KEY)


def altered(raw: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The file with another header and a checksum that fits."""
    magic, version, header_bytes, *rest = PREFIX.unpack_from(raw)
    fields = json.loads(raw[PREFIX.size : PREFIX.size + header_bytes])
    change(fields)
    header = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    body = PREFIX.pack(magic, version, len(header), *rest) + header + raw[PREFIX.size + header_bytes : -CHECKSUM_BYTES]
    return body + checksum(body)


async def test_P4_an_imported_session_goes_on_as_the_original_would() -> None:
    async with two_servers() as (one, two):
        imported = ok(await import_(two, await export(one)))
        original = await head_of(one)
        # The replica is a hint of where the state may be in memory: no part of the conversation.
        same = set(original) - {"created_at", "updated_at", "expires_at", "replica"}
        assert {name: imported[name] for name in same} == {name: original[name] for name in same}
        assert "rebuilt" not in imported
        answers = [await say(server, "three") for server in (one, two)]
        assert answers[0]["usage"] == answers[1]["usage"]
        assert answers[0]["session"] == answers[1]["session"]
        snapshots, logs = zip(*[await state_of(server) for server in (one, two)], strict=True)
        assert logs[0] == logs[1]
        assert snapshots[0].state == snapshots[1].state == state_after(logs[0][:-1])
        assert snapshots[0].header.sampler == snapshots[1].header.sampler
        marks = [await server.services.store.log_marks(KEY) for server in (one, two)]
        assert marks[0] == marks[1]


async def test_a_file_may_be_imported_under_another_id_and_not_over_a_session() -> None:
    async with two_servers() as (one, _):
        raw = await export(one)
        response = await import_(one, raw)
        assert (response.status_code, error_of(response)["code"]) == (409, "version_conflict")
        assert ok(await import_(one, raw, id="copy"))["id"] == "copy"
        assert (await say(one, "three", "copy"))["session"]["version"] == 3
        response = await import_(one, raw, id="a b")
        assert (response.status_code, error_of(response)["param"]) == (400, "id")


async def test_an_empty_session_may_travel() -> None:
    async with gateway(FakeBackend()) as one, gateway(FakeBackend()) as two:
        ok(await one.client.post("/v1/sessions", json={"id": "s1"}))
        assert ok(await import_(two, await export(one)))["version"] == 0
        assert (await say(two, "one"))["session"]["version"] == 1


async def test_a_file_of_another_model_is_refused_and_both_are_named() -> None:
    async with two_servers(FakeBackend(fingerprint="a newer model")) as (one, two):
        response = await import_(two, await export(one))
        error = error_of(response)
        assert (response.status_code, error["code"]) == (409, "state_mismatch")
        assert response.headers["x-should-retry"] == "false"
        assert "model fake-fingerprint, this server runs a newer model" in error["message"]
        assert "rebuild=true" in error["message"]
        assert (await two.client.get("/v1/sessions/s1")).status_code == 404


async def test_a_file_of_another_model_is_read_again_where_that_is_wished() -> None:
    backend = FakeBackend(fingerprint="a newer model")
    async with two_servers(backend) as (one, two):
        imported = ok(await import_(two, await export(one), rebuild="true"))
        original = await head_of(one)
        assert (imported["rebuilt"], imported["model_fingerprint"]) == ("fingerprint_mismatch", "a newer model")
        assert (imported["version"], imported["position"]) == (original["version"], original["position"])
        (old, log), (new, new_log) = await state_of(one), await state_of(two)
        assert new_log == log
        assert (new.state, new.header.sampler, new.header.pending_id) == (old.state, old.header.sampler, log[-1])
        answer = await say(two, "three")
        assert "rebuilt" not in answer["session"]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == original["position"]


async def test_a_rebuild_that_fails_makes_no_session() -> None:
    backend = FakeBackend(fingerprint="a newer model", fail_after=0)
    async with two_servers(backend) as (one, two):
        response = await import_(two, await export(one), rebuild="true")
        assert (response.status_code, error_of(response)["message"]) == (500, "the fake was told to fail")
        assert (await two.client.get("/v1/sessions/s1")).status_code == 404


async def test_a_file_of_another_tokenizer_is_refused_in_any_case() -> None:
    tokenizer = BpeTokenizer.train(["something else entirely"] * 4, vocab_size=300)
    async with two_servers(FakeBackend(fingerprint="a newer model", tokenizer=tokenizer)) as (one, two):
        raw = await export(one)
        for rebuild in ("false", "true"):
            response = await import_(two, raw, rebuild=rebuild)
            assert (response.status_code, error_of(response)["code"]) == (409, "state_mismatch")
            assert tokenizer.fingerprint in error_of(response)["message"]


async def test_a_damaged_file_is_refused_wherever_the_damage_is() -> None:
    async with two_servers() as (one, two):
        raw = await export(one)
        damaged = [b"", b"no file", raw[:-1], raw + b"\0", b"X" + raw[1:], raw[:8] + b"\x02" + raw[9:]]
        damaged += [raw[:offset] + bytes([raw[offset] ^ 1]) + raw[offset + 1 :] for offset in range(9, len(raw), 37)]
        for bad in damaged:
            response = await import_(two, bad)
            assert (response.status_code, error_of(response)["code"]) == (400, "invalid_session_file")
        assert ok(await two.client.get("/v1/sessions"))["data"] == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"position": 1}, "position"),
        ({"position": -1}, "position is no count"),
        ({"version": 9}, "marks do not end"),
        ({"marks": []}, "marks do not end"),
        ({"marks": [[2, 0, 1, 0]]}, "marks are not in order"),
        ({"marks": [[1, 2]]}, "four numbers"),
        ({"marks": [[1, 2, 3, 2**64]]}, "seed"),
        ({"marks": 5}, "no list"),
        ({"session_id": "s2"}, "another session_id"),
        ({"model_fingerprint": "mine"}, "another model_fingerprint"),
        ({"forked_from": 5}, "forked_from"),
        ({"forked_from": "s" * 10_000}, "forked_from"),
        ({"metadata": {"k": 5}}, "metadata.k"),
        ({"metadata": {"k": "v" * 513}}, "512"),
        ({"ttl_s": -5}, "ttl_s"),
        ({"surprise": 1}, "fields of its format"),
    ],
    ids=str,
)
async def test_a_file_that_lies_is_refused(change: dict[str, Any], says: str) -> None:
    async with two_servers() as (one, two):
        response = await import_(two, altered(await export(one), lambda fields: fields.update(change)))
        assert response.status_code == 400, response.text
        assert says in error_of(response)["message"]
        assert ok(await two.client.get("/v1/sessions"))["data"] == []


async def test_an_unknown_session_cannot_be_exported() -> None:
    async with gateway(FakeBackend()) as server:
        response = await server.client.get("/v1/sessions/s1/export")
        assert (response.status_code, error_of(response)["code"]) == (404, "session_not_found")


async def test_a_file_over_the_body_limit_is_413() -> None:
    async with gateway(FakeBackend(), max_body_bytes=1_000) as server:
        response = await import_(server, b"x" * 1_001)
        assert (response.status_code, error_of(response)["code"]) == (413, "body_too_large")
