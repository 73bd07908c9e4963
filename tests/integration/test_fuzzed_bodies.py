"""Bodies that nobody would write: made from the API's description, then broken as values or as bytes."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import orjson
import pytest

from tests.support.counts import is_soak, scaled
from tests.support.watched_server import MAX_STALL_S, Schema, Watched, least_stall, operations, resolved

OPERATIONS = operations()
NUM_BODIES = scaled(600, 100_000) // len(OPERATIONS) + 1  # of each operation
BATCH = 20  # bodies between two looks at the stall
IDLE_LIMIT_S = 60.0
ODD_VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**31, 2**63, -(2**63), 2**64 - 1, 0.1, -0.0, 1e-320, 1e308),
    *("", " ", "\0", "\u2028", "é" * 40, "x" * 10_000, "1", "true", "null", "../x", "%00", "\U0001f600"),
    *([], {}, [[]], [{}], {"": {}}, {"$ref": "#"}, [None] * 100, {"type": "text"}, [1, "a", None]),
]
ODD_BYTES = [
    *(b"\xff", b"\xed\xa0\x80", b"\0", b"\\ud800", b"NaN", b"-Infinity", b"1e999", b"0x1", b"+1", b"01", b",", b"}"),
    *(b"{", b"[" * 200, b'"', b"\xef\xbb\xbf", b"/**/", b"9" * 5_000, b"\\u0000", b"--", b"'"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Watched]:
    with Watched() as watched:
        yield watched


def fitting(choose: random.Random, schema: Schema, components: Schema, depth: int = 0) -> Any:
    """A value that fits, or nearly: with any of the fields that there are."""
    one = choose.choice(resolved(schema, components))
    if "const" in one or "enum" in one:
        return one["const"] if "const" in one else choose.choice(one["enum"])
    kind = one.get("type")
    if kind == "object":
        fields, required = one.get("properties", {}), one.get("required", ())
        share = choose.random() ** 3
        return {
            name: fitting(choose, part, components, depth + 1)
            for name, part in fields.items()
            if name in required or choose.random() < share
        }
    if kind == "array":
        return [fitting(choose, one.get("items", {}), components, depth + 1) for _ in range(choose.randint(0, 3))]
    if kind == "integer":
        return choose.choice([0, 1, 2, 3, 7, 20])
    if kind == "number":
        return choose.choice([0, 0.5, 1, 2.0])
    return {"boolean": choose.random() < 0.5, "null": None}.get(kind, choose.choice(["x", "user", "Hi there", "a b"]))


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of all values inside, by keys and indices."""
    yield path
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield from paths_of(inner, (*path, key))


def changed(value: Any, path: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    if not path:
        return change(value)
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(value[path[0]], path[1:], change)
    return copy


def broken_value(choose: random.Random, value: Any) -> Any:
    """One place is another value, in a list, has one field more or fewer, or entries twice."""
    path, odd = choose.choice(list(paths_of(value))), choose.choice(ODD_VALUES)
    inner: Any = None

    def change(found: Any) -> Any:
        nonlocal inner
        inner = found
        kind = choose.randrange(5)
        if kind == 0:
            return [found]
        if kind == 1 and isinstance(found, dict):
            return {**found, choose.choice(["", "x", "__proto__", "type", "stream", "n"]): odd}
        if kind == 2 and isinstance(found, dict) and found:
            left_out = choose.choice(list(found))
            return {name: entry for name, entry in found.items() if name != left_out}
        if kind == 3 and isinstance(found, list):
            return found * choose.choice([2, 50])
        return odd

    return changed(value, path, change)


def broken_bytes(choose: random.Random, raw: bytes) -> bytes:
    start = choose.randint(0, len(raw))
    end = min(len(raw), start + choose.choice([0, 0, 1, 5, 1_000]))
    middle = choose.choice([b"", raw[start:end] * 2, choose.choice(ODD_BYTES), choose.randbytes(3)])
    return raw[:start] + middle + raw[end:]


def body(choose: random.Random, schema: Schema, components: Schema) -> bytes:
    value = fitting(choose, schema, components)
    for _ in range(choose.choice([0, 1, 1, 2, 4])):
        value = broken_value(choose, value)
    raw = orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)
    for _ in range(choose.choice([0, 0, 0, 1, 2])):
        raw = broken_bytes(choose, raw)
    return raw


def send_all(server: Watched, method: str, url: str, bodies: list[bytes]) -> float:
    """Each answer is no fault of the server. The longest stall on the way, in seconds."""
    server.stall_s = 0.0
    for raw in bodies:
        answer = server.client.request(method, url, content=raw, headers={"content-type": "application/json"})
        assert answer.status_code < 500 or answer.status_code in (503, 504), (raw, answer.text)
        assert "internal_error" not in answer.text, (raw, answer.text)
        if answer.status_code >= 400:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}, raw
    server.client.get("/health/live")
    return server.stall_s


@pytest.mark.timeout(14_400 if is_soak() else 300)
@pytest.mark.parametrize(("method", "path", "schema", "components"), OPERATIONS, ids=lambda value: str(value)[:40])
def test_no_fuzzed_body_is_a_fault_a_stall_or_a_request_that_stays(
    server: Watched, method: str, path: str, schema: Schema, components: Schema
) -> None:
    choose = random.Random(f"{method} {path}")
    server.client.post("/v1/sessions", json={"id": "s1"})
    conversation = server.client.post("/v1/conversations", json={}).json()["id"]
    url = path.replace("{session_id}", "s1").replace("{conversation_id}", conversation)
    for start in range(0, NUM_BODIES, BATCH):
        bodies = [body(choose, schema, components) for _ in range(min(BATCH, NUM_BODIES - start))]
        assert least_stall(functools.partial(send_all, server, method, url, bodies)) <= MAX_STALL_S, bodies
    lifecycle, until = server.app.state.services.lifecycle, time.monotonic() + IDLE_LIMIT_S
    while (server.backend.running or lifecycle.num_active) and time.monotonic() < until:
        time.sleep(0.01)  # responses in the background
    assert (server.backend.running, lifecycle.num_active) == (set(), 0)
