"""X5: the files of a SQLite store are removed, moved, cut or replaced, under a running server and at rest.

Whatever happens, a call is either refused by name, with a metric and a line at ERROR, or what it acknowledged is there
after a restart.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sqlite3
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from nsm_core.errors import NsmError
from service.stores.sessions.key import SessionKey
from service.stores.sessions.sqlite import SqliteSessionStore
from tests.support.damaged_pages import damage_table
from tests.support.fakes import FakeBackend
from tests.support.gateway import Gateway, error_of, gateway

KEY = SessionKey("default", "s1")
TEXT = "it was the age of wisdom, it was the age of foolishness, it was the epoch of belief"
Fault = Callable[[Path, Path], None]


def remove(file: Path, older: Path) -> None:
    file.unlink()


def move(file: Path, older: Path) -> None:
    file.rename(file.with_name("moved"))


def replace_with_another(file: Path, older: Path) -> None:
    other = file.with_name("other")
    other.write_bytes(b"a diary\n" * 10_000)
    other.replace(file)


def replace_with_older(file: Path, older: Path) -> None:
    shutil.copy(older, file.with_name("copied"))
    file.with_name("copied").replace(file)


def cut_to_nothing(file: Path, older: Path) -> None:
    os.truncate(file, 0)


def cut_in_half(file: Path, older: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def overwrite_with_older(file: Path, older: Path) -> None:
    file.write_bytes(older.read_bytes())


def overwrite_with_another(file: Path, older: Path) -> None:
    file.write_bytes(b"a diary\n" * (file.stat().st_size // 8 + 1))


ANOTHER_FILE: tuple[Fault, ...] = (remove, move, replace_with_another, replace_with_older)
SAME_FILE: tuple[Fault, ...] = (cut_to_nothing, cut_in_half, overwrite_with_older, overwrite_with_another)


async def turn(server: Gateway) -> httpx.Response:
    return await server.client.post("/v1/sessions/s1/generate", json={"input": "x", "max_tokens": 3})


def move_log_into_database(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as other:
        assert other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0


async def version_after_restart(path: Path, image: Path) -> int:
    """Of s1, where a process that was killed left its files; -1 where there is none, or no database."""
    image.mkdir()
    for file in path.parent.glob("sessions.db*"):
        if "-open-" not in file.name:
            shutil.copy(file, image / file.name)
    store = SqliteSessionStore(image / path.name)
    try:
        await store.open()
        return (await store.get(KEY)).version
    except NsmError:
        return -1
    finally:
        await store.close()


async def assert_refused_as_replaced(server: Gateway, answer: httpx.Response, log: pytest.LogCaptureFixture) -> None:
    assert (answer.status_code, error_of(answer)["code"]) == (503, "store_replaced"), answer.text
    assert (await server.client.get("/health/ready")).status_code == 503
    assert server.metric("nsm_store_damage_total", part="files") >= 2
    assert any(record.levelno == logging.ERROR and record.name == "nsm.store" for record in log.records)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[Gateway, Path]]:
    path = tmp_path / "data" / "sessions.db"
    async with gateway(FakeBackend(TEXT), store=SqliteSessionStore(path)) as server:
        await server.client.post("/v1/sessions", json={"id": "s1"})
        yield server, path


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm"], ids=["database", "log", "index"])
@pytest.mark.parametrize("fault", ANOTHER_FILE)
async def test_X5_another_file_in_the_place_of_an_open_one_refuses_turns_and_readiness(
    served: tuple[Gateway, Path], fault: Fault, suffix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server, path = served
    file, older = path.with_name(path.name + suffix), tmp_path / "older"
    assert (await turn(server)).status_code == 200
    shutil.copy(file, older)
    assert (await turn(server)).status_code == 200
    fault(file, older)
    await assert_refused_as_replaced(server, await turn(server), caplog)
    listed = await server.client.get("/v1/sessions")
    assert (listed.status_code, error_of(listed)["code"]) == (503, "store_replaced")


async def test_X5_a_file_that_is_moved_back_is_used_again(served: tuple[Gateway, Path]) -> None:
    server, path = served
    path.rename(path.with_name("moved"))
    assert (await turn(server)).status_code == 503
    path.with_name("moved").rename(path)
    assert (await turn(server)).json()["session"]["version"] == 1
    assert (await server.client.get("/health/ready")).status_code == 200


@pytest.mark.parametrize("is_flushed", [False, True], ids=["in_the_log", "in_the_database"])
@pytest.mark.parametrize("suffix", ["", "-wal", "-shm"], ids=["database", "log", "index"])
@pytest.mark.parametrize("fault", SAME_FILE)
async def test_X5_an_open_file_that_is_cut_or_overwritten_never_takes_back_an_acknowledged_turn(
    served: tuple[Gateway, Path],
    fault: Fault,
    suffix: str,
    is_flushed: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`is_moved`: the turns have left the write-ahead log for the database file."""
    server, path = served
    file, older = path.with_name(path.name + suffix), tmp_path / "older"
    for number in range(2):
        for _ in range(2):
            assert (await turn(server)).status_code == 200
        if is_flushed:
            move_log_into_database(path)
        if number == 0:
            shutil.copy(file, older)
    fault(file, older)
    answer = await turn(server)
    if answer.status_code == 200:
        version = answer.json()["session"]["version"]
        assert version == 5
        assert await version_after_restart(path, tmp_path / "image") == version
    elif error_of(answer)["code"] == "store_replaced":
        await assert_refused_as_replaced(server, answer, caplog)
    else:
        assert answer.status_code == 503
        assert error_of(answer)["code"] in ("store_unavailable", "store_damaged")


@pytest.mark.parametrize("suffix", ["-ballast", "-stamp"], ids=["ballast", "stamp"])
@pytest.mark.parametrize("fault", [*ANOTHER_FILE, *SAME_FILE])
async def test_X5_files_beside_the_database_may_vanish_or_change(
    served: tuple[Gateway, Path], fault: Fault, suffix: str, tmp_path: Path
) -> None:
    server, path = served
    file, older = path.with_name(path.name + suffix), tmp_path / "older"
    shutil.copy(file, older)
    assert (await turn(server)).status_code == 200
    fault(file, older)
    for version in (2, 3):
        assert (await turn(server)).json()["session"]["version"] == version
    assert await version_after_restart(path, tmp_path / "image") == 3


async def killed(path: Path, image: Path, *, num_turns: int, is_flushed: bool) -> None:
    """`image`: the files of a server that was killed after its turns; those before the last are in the database."""
    async with gateway(FakeBackend(TEXT), store=SqliteSessionStore(path)) as server:
        await server.client.post("/v1/sessions", json={"id": "s1"})
        for number in range(num_turns):
            if number == num_turns - 1:
                move_log_into_database(path)
            assert (await turn(server)).status_code == 200
        if is_flushed:
            move_log_into_database(path)
        image.mkdir()
        for file in path.parent.glob("sessions.db*"):
            shutil.copy(file, image / file.name)


@pytest.mark.parametrize(
    ("suffix", "fault", "is_flushed", "version"),
    [
        ("-wal", remove, False, 2),
        ("-wal", cut_to_nothing, False, 2),
        ("-wal", cut_in_half, False, 2),
        ("-wal", overwrite_with_another, False, 2),
        ("", remove, True, None),
        ("", cut_to_nothing, True, None),
        ("", overwrite_with_older, True, 1),
    ],
)
async def test_X5_a_start_without_all_that_was_acknowledged_says_so(
    suffix: str,
    fault: Fault,
    is_flushed: bool,
    version: int | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`version`: what is left of three turns; it is an older state of the session, whole in itself."""
    await killed(tmp_path / "first" / "sessions.db", tmp_path / "older", num_turns=1, is_flushed=True)
    await killed(tmp_path / "second" / "sessions.db", tmp_path / "image", num_turns=3, is_flushed=is_flushed)
    path = tmp_path / "image" / "sessions.db"
    fault(path.with_name(path.name + suffix), tmp_path / "older" / path.name)
    async with gateway(FakeBackend(TEXT), store=SqliteSessionStore(path)) as server:
        assert server.metric("nsm_store_damage_total", part="lost_writes") == 1
        assert any(
            "were acknowledged" in record.message for record in caplog.records if record.levelno == logging.ERROR
        )
        answer = await turn(server)
        if version is None:
            assert (answer.status_code, error_of(answer)["code"]) == (404, "session_not_found")
        else:
            assert answer.json()["session"]["version"] == version + 1
    caplog.clear()
    async with gateway(FakeBackend(TEXT), store=SqliteSessionStore(path)) as server:  # it is told once
        assert server.metric("nsm_store_damage_total", part="lost_writes") == 0


@pytest.mark.parametrize("fault", [cut_in_half, overwrite_with_another])
async def test_X5_a_damaged_database_at_rest_is_refused_or_its_sessions_are(fault: Fault, tmp_path: Path) -> None:
    await killed(tmp_path / "data" / "sessions.db", tmp_path / "image", num_turns=3, is_flushed=True)
    path = tmp_path / "image" / "sessions.db"
    fault(path, path)
    store = SqliteSessionStore(path)
    with pytest.raises(NsmError, match="damaged or not a database"):
        await store.open()


async def test_X5_damaged_pages_end_readiness_once_a_call_has_met_them(tmp_path: Path) -> None:
    await killed(tmp_path / "data" / "sessions.db", tmp_path / "image", num_turns=2, is_flushed=True)
    path, sound = tmp_path / "image" / "sessions.db", tmp_path / "sound.db"
    shutil.copy(path, sound)
    damage_table(path, "log_chunks")
    async with gateway(FakeBackend(TEXT), store=SqliteSessionStore(path)) as server:
        answer = await turn(server)
        assert (answer.status_code, error_of(answer)["code"]) == (503, "store_damaged"), answer.text
        for _ in range(2):
            ready = await server.client.get("/health/ready")
            assert (ready.status_code, ready.json()["checks"]["store"]) == (503, False)
        assert (await server.client.get("/v1/sessions/s1")).status_code == 200  # what can be read is
        assert (await server.client.get("/health/live")).status_code == 200
    shutil.copy(sound, path)
    async with gateway(FakeBackend(TEXT), store=SqliteSessionStore(path)) as server:
        assert (await turn(server)).json()["session"]["version"] == 3
        assert (await server.client.get("/health/ready")).status_code == 200


@pytest.mark.parametrize("suffix", ["-shm", "-stamp", "-ballast"])
@pytest.mark.parametrize("fault", [remove, cut_to_nothing, cut_in_half, overwrite_with_another])
async def test_X5_what_can_be_made_again_is_made_again_at_the_start(
    suffix: str, fault: Fault, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await killed(tmp_path / "data" / "sessions.db", tmp_path / "image", num_turns=3, is_flushed=False)
    path = tmp_path / "image" / "sessions.db"
    fault(path.with_name(path.name + suffix), path)
    answer: Any
    async with gateway(FakeBackend(TEXT), store=SqliteSessionStore(path)) as server:
        answer = await turn(server)
        assert answer.json()["session"]["version"] == 4
