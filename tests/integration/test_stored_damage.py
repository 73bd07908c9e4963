"""X6: every table of the SQLite store and every key in Redis is emptied, dropped, cut and taken back.

Under a running server and before it starts. A turn is then refused by name, with a metric and a line in the log, or it
goes on from a state that is the one of its token log.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nsm_core.errors import StoreDamaged
from service.stores.redis.url import parse_redis_url
from service.stores.sessions.base import SessionStore
from service.stores.sessions.key import SessionKey
from service.stores.sessions.redis import RedisSessionStore
from service.stores.sessions.sqlite import SqliteSessionStore
from service.transfer.verify import verify
from tests.support.counts import every_second
from tests.support.fakes import FakeBackend
from tests.support.gateway import Gateway, error_of, gateway
from tests.support.redis_servers import Topology, own_prefix

KEY = SessionKey("default", "s1")
TEXT = "it was the age of wisdom, it was the age of foolishness, it was the epoch of belief"
LONG = [5] * 400  # so that older snapshots are worth their bytes
# What a call may answer: 200, or one of these. Never an internal error.
REFUSALS = {
    (404, "session_not_found"),
    (404, "previous_response_not_found"),
    (404, "response_not_found"),
    (404, "state_not_found"),
    (409, "lease_lost"),
    (500, "log_corrupt"),
    (500, "snapshot_corrupt"),
    (503, "store_unavailable"),
    (503, "store_damaged"),
    (503, "store_replaced"),
}

TABLES = (
    *("sessions", "snapshots", "log_chunks", "older_snapshots", "turns", "turn_chunks", "records", "usage"),
    *("record_usage", "expired_sessions", "named_states", "named_state_versions"),
)
BLOBS = {
    "sessions": "metadata",
    "snapshots": "snapshot",
    "log_chunks": "ids",
    "turns": "result",
    "records": "document",
    "named_states": "file",
}
STATE = {"name": "rules", "text": "a rule"}
READS = (
    *("/v1/sessions/s1", "/v1/sessions", "/v1/sessions/s1/export", "/v1/sessions/s1/states"),
    *("/v1/states", "/v1/states/rules", "/v1/states/rules@1", "/v1/states/rules/export"),
)
WRITES = (
    ("/v1/responses", {"input": "x", "max_output_tokens": 3}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 3, "state": "rules"}),
    ("/v1/sessions", {"state": "rules@1"}),
    ("/v1/states", STATE),
)
Rows = dict[str, list[tuple[Any, ...]]]


async def talk(server: Gateway, *, is_first: bool) -> None:
    """A turn of a session, a response, and a named state."""
    if is_first:
        assert (await server.client.post("/v1/sessions", json={"id": "s1"})).status_code == 200
    answer = await server.client.post("/v1/sessions/s1/generate", json={"input": LONG, "max_tokens": 3})
    assert answer.status_code == 200, answer.text
    for path, body in (("/v1/responses", {"input": "x", "max_output_tokens": 3}), ("/v1/states", STATE)):
        assert (await server.client.post(path, json=body)).status_code == 200


async def assert_typed(server: Gateway, log: pytest.LogCaptureFixture) -> None:
    """Every kind of call, twice: the first may put things right."""
    backend = server.services.backend
    for _ in range(2):
        turn = await server.client.post("/v1/sessions/s1/generate", json={"input": [7], "max_tokens": 3})
        reads = [await server.client.get(path) for path in READS]
        writes = [await server.client.post(path, json=body) for path, body in WRITES]
        for answer in (turn, *reads, *writes):
            if answer.status_code == 200:
                continue
            error = error_of(answer)
            assert (answer.status_code, error["code"]) in REFUSALS, answer.text
            if answer.status_code >= 500:
                assert error["message"].startswith(("session ", "the ", "what ", "a ")), error
                assert any(
                    one.levelno >= logging.WARNING and error["message"][:40] in one.message for one in log.records
                )
                assert damage_counted(server) > 0
        if turn.status_code == 200:
            if turn.json()["session"].get("rebuilt"):
                assert sum(server.metric("nsm_session_resume_total", outcome=why) for why in ("missing", "corrupt")) > 0
            (verified,) = [one async for one in verify(server.services.store, backend, [KEY])]
            assert verified.verdict == "same", verified


def damage_counted(server: Gateway) -> float:
    """Damage, or calls that failed."""
    samples = [sample for metric in server.services.metrics.registry.collect() for sample in metric.samples]
    return sum(
        sample.value
        for sample in samples
        if sample.name == "nsm_store_damage_total"
        or (sample.name == "nsm_store_operation_seconds_count" and sample.labels["outcome"] == "failed")
    )


# --- tables -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def foreign(path: Path) -> Iterator[sqlite3.Connection]:
    """Another program's connection, which knows nothing of what belongs together."""
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        yield connection


async def test_X6_every_table_is_damaged_by_these_tests(tmp_path: Path) -> None:
    async with gateway(FakeBackend(TEXT), store=SqliteSessionStore(tmp_path / "sessions.db")):
        with foreign(tmp_path / "sessions.db") as connection:
            tables = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
            assert {name for (name,) in connection.execute(tables)} == set(TABLES)


def rows_of(path: Path) -> Rows:
    with foreign(path) as connection:
        return {table: connection.execute(f"SELECT * FROM {table}").fetchall() for table in TABLES}


def empty(path: Path, table: str, older: Rows) -> None:
    with foreign(path) as connection:
        connection.execute(f"DELETE FROM {table}")


def drop(path: Path, table: str, older: Rows) -> None:
    with foreign(path) as connection:
        connection.execute(f"DROP TABLE {table}")


def cut(path: Path, table: str, older: Rows) -> None:
    column = BLOBS.get(table)
    if column is not None:
        with foreign(path) as connection:
            connection.execute(f"UPDATE {table} SET {column} = substr({column}, 1, length({column}) / 2)")


def take_back(path: Path, table: str, older: Rows) -> None:
    with foreign(path) as connection:
        connection.execute(f"DELETE FROM {table}")
        for row in older[table]:
            connection.execute(f"INSERT OR REPLACE INTO {table} VALUES ({', '.join('?' * len(row))})", row)


TableFault = Callable[[Path, str, Rows], None]


def table_cases() -> Iterator[Any]:
    """At rest a table that is emptied or cut is read by the same code as under a running server."""
    for is_running in (True, False):
        for row, fault in enumerate((empty, drop, cut, take_back)):
            for column, table in enumerate(TABLES):
                if not every_second(row, column):
                    continue
                marks = [] if is_running or fault in (drop, take_back) else [pytest.mark.slow]
                name = f"{'running' if is_running else 'at_rest'}-{fault.__name__}-{table}"
                yield pytest.param(is_running, fault, table, id=name, marks=marks)


@pytest.mark.parametrize(("is_running", "fault", "table"), list(table_cases()))
async def test_X6_a_damaged_table_refuses_by_name_or_the_state_is_made_again(
    is_running: bool, fault: TableFault, table: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "sessions.db"
    async with gateway(FakeBackend(TEXT), store=SqliteSessionStore(path)) as server:
        await talk(server, is_first=True)
        older = rows_of(path)
        await talk(server, is_first=False)
        if is_running:
            fault(path, table, older)
            await assert_typed(server, caplog)
            return
    fault(path, table, older)
    if (fault, table) == (drop, "usage"):  # it has the stamp
        with pytest.raises(StoreDamaged, match="the session store is damaged"):
            await SqliteSessionStore(path).open()
        return
    async with gateway(FakeBackend(TEXT), store=SqliteSessionStore(path)) as server:
        await assert_typed(server, caplog)


async def test_X6_a_version_is_not_given_again_when_the_table_of_the_newest_ones_was_emptied(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    async with gateway(FakeBackend(TEXT), store=SqliteSessionStore(path)) as server:
        await assert_versions_stay(server, lambda: empty(path, "named_state_versions", {}))


async def assert_versions_stay(server: Gateway, lose: Callable[[], None]) -> None:
    for version in (1, 2):
        assert (await server.client.post("/v1/states", json=STATE)).json()["version"] == version
    first = (await server.client.get("/v1/states/rules@1/export")).content
    lose()
    assert (await server.client.post("/v1/states", json={**STATE, "text": "another"})).json()["version"] == 3
    assert (await server.client.get("/v1/states/rules@1/export")).content == first


# --- keys -------------------------------------------------------------------------------------------------------------

PARTS = ("head", "log", "marks", "snapshot", "turns", "retained:1", "index", "sizes", "expiry", "usage")
OTHERS = (
    *("documents", "document-bytes", "record", "layout-version", "probe"),
    *("state", "state-heads", "state-versions", "state-additions"),
)


class Keys:
    """The keys of one installation, in a server that anybody may write to."""

    def __init__(self, topology: Topology, prefix: str) -> None:
        self.client = topology.servers[0].client()
        self.prefix = prefix

    def named(self, part: str) -> list[bytes]:
        return [key for key in self.client.scan_iter(f"{self.prefix}:*") if part_of(key) == part]

    def dumped(self) -> dict[bytes, bytes]:
        return {key: self.client.dump(key) for key in self.client.scan_iter(f"{self.prefix}:*")}


def part_of(key: bytes) -> str:
    """What is behind the braces, without a nonce."""
    name = key.rpartition(b"}:")[2].decode() if b"}:" in key else key.rpartition(b":")[2].decode()
    return "state" if name.startswith("state:") else name


def delete_key(keys: Keys, key: bytes, older: dict[bytes, bytes]) -> None:
    keys.client.delete(key)


def retype_key(keys: Keys, key: bytes, older: dict[bytes, bytes]) -> None:
    kind = keys.client.type(key)
    keys.client.delete(key)
    if kind == b"string":
        keys.client.rpush(key, b"x")
    else:
        keys.client.set(key, b"x")


def cut_key(keys: Keys, key: bytes, older: dict[bytes, bytes]) -> None:
    client, kind = keys.client, keys.client.type(key)
    if kind == b"string":
        raw = client.get(key)
        client.set(key, raw[: len(raw) // 2])
    elif kind == b"list":
        raw = client.lindex(key, -1)
        client.lset(key, -1, raw[: len(raw) // 2])
    elif kind == b"hash":
        for field, value in client.hgetall(key).items():
            client.hset(key, field, value[: len(value) // 2])


def take_key_back(keys: Keys, key: bytes, older: dict[bytes, bytes]) -> None:
    keys.client.delete(key)
    if key in older:
        keys.client.restore(key, 0, older[key])


KeyFault = Callable[[Keys, bytes, dict[bytes, bytes]], None]


@pytest.fixture
async def in_redis(redis_single: Topology) -> AsyncIterator[tuple[Callable[[], SessionStore], Keys]]:
    prefix = own_prefix()
    url = redis_single.url_with(prefix=prefix)
    keys = Keys(redis_single, prefix)
    yield lambda: RedisSessionStore(parse_redis_url(url)), keys
    keys.client.close()


@pytest.mark.redis
@pytest.mark.parametrize(
    ("fault", "part"),
    [
        pytest.param(fault, part, id=f"{fault.__name__}-{part}")
        for row, fault in enumerate((delete_key, retype_key, cut_key, take_key_back))
        for column, part in enumerate((*PARTS, *OTHERS))
        if every_second(row, column)
    ],
)
async def test_X6_a_damaged_key_refuses_by_name_or_the_state_is_made_again(
    fault: KeyFault,
    part: str,
    in_redis: tuple[Callable[[], SessionStore], Keys],
    caplog: pytest.LogCaptureFixture,
) -> None:
    make_store, keys = in_redis
    async with gateway(FakeBackend(TEXT), store=make_store()) as server:
        await talk(server, is_first=True)
        older = keys.dumped()
        await talk(server, is_first=False)
        for key in keys.named(part):
            fault(keys, key, older)
        await assert_typed(server, caplog)


@pytest.mark.redis
async def test_X6_every_key_is_damaged_by_these_tests(in_redis: tuple[Callable[[], SessionStore], Keys]) -> None:
    make_store, keys = in_redis
    async with gateway(FakeBackend(TEXT), store=make_store()) as server:
        await talk(server, is_first=True)
        await talk(server, is_first=False)
        assert {part_of(key) for key in keys.dumped()} <= {*PARTS, *OTHERS}


@pytest.mark.redis
@pytest.mark.parametrize("fault", [delete_key, cut_key])
async def test_X6_a_version_is_not_given_again_when_the_key_of_the_newest_ones_was_lost(
    fault: KeyFault, in_redis: tuple[Callable[[], SessionStore], Keys]
) -> None:
    make_store, keys = in_redis
    async with gateway(FakeBackend(TEXT), store=make_store()) as server:
        await assert_versions_stay(server, lambda: fault(keys, keys.named("state-versions")[0], {}))


@pytest.mark.redis
@pytest.mark.parametrize("part", ["log", "marks"])
async def test_X6_a_damaged_middle_of_a_log_is_named_by_whoever_reads_it_and_found_at_rest(
    part: str, in_redis: tuple[Callable[[], SessionStore], Keys], caplog: pytest.LogCaptureFixture
) -> None:
    """A turn looks at the last chunk alone. It goes on from a sound state; what needs the whole log is refused."""
    make_store, keys = in_redis
    async with gateway(FakeBackend(TEXT), store=make_store()) as server:
        for is_first in (True, False, False):
            await talk(server, is_first=is_first)
        (key,) = [key for key in keys.named(part) if keys.client.llen(key) == 3]  # a response has a session of its own
        middle = keys.client.lindex(key, 1)
        keys.client.lset(key, 1, middle[:-1] + bytes([middle[-1] ^ 0x11]))
        answer = await server.client.get("/v1/sessions/s1/export")
        assert (answer.status_code, error_of(answer)["code"]) == (500, "log_corrupt")
        assert server.metric("nsm_store_damage_total", part="log") > 0
        turn = await server.client.post("/v1/sessions/s1/generate", json={"input": [7], "max_tokens": 3})
        assert turn.status_code == 200, turn.text
        (verified,) = [one async for one in verify(server.services.store, server.services.backend, [KEY])]
        assert verified.verdict == "damaged", verified
