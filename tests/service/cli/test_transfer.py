from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import sqlite3
import subprocess
from pathlib import Path

import pytest

from service.stores.records.base import ABSENT
from service.stores.records.factory import records_beside
from service.stores.sessions.sqlite import SqliteSessionStore
from tests.service.cli.conftest import Nsm, assert_one_line
from tests.service.cli.test_sessions import talk
from tests.support.damaged_pages import damage_blob, damage_index, damage_table
from tests.support.redis_servers import Topology


def listed(nsm: Nsm, store: str) -> list[tuple[str, int, int]]:
    found = json.loads(nsm("sessions", "list", "--store", store, "--json").stdout)
    return [(session["id"], session["version"], session["position"]) for session in found]


def test_restored_session_continues_like_the_original(nsm: Nsm, tmp_path: Path) -> None:
    file, other = tmp_path / "all.nsm", f"sqlite:///{tmp_path / 'other.db'}"
    session_id = talk(nsm, "Hello")
    talk(nsm, "Hello\nAgain")
    assert nsm("sessions", "backup", file).stdout == f"backup {file}: 2 written\n"
    assert nsm("sessions", "restore", file, "--store", other).stdout == f"restore {file}: 2 written\n"
    assert nsm("sessions", "restore", file, "--store", other).stdout == f"restore {file}: 2 there already\n"
    assert listed(nsm, other) == listed(nsm, "sqlite")
    again = ("chat", "--session", session_id, "--max-tokens", 6)
    assert nsm(*again, "--store", other, stdin="And now?").stdout == nsm(*again, stdin="And now?").stdout


def test_restore_lists_skipped_sessions(nsm: Nsm, tmp_path: Path) -> None:
    file, session_id = tmp_path / "all.nsm", talk(nsm)
    nsm("sessions", "backup", file)
    nsm("chat", "--session", session_id, "--max-tokens", 2, stdin="More")
    result = nsm("sessions", "restore", file)
    assert (result.exit_code, result.stdout) == (0, f"restore {file}: 1 skipped\n")
    assert f"default/{session_id}: skipped: another one has the id" in result.stderr
    assert nsm("sessions", "restore", file, "--overwrite").stdout == f"restore {file}: 1 replaced\n"
    assert [version for _, version, _ in listed(nsm, "sqlite")] == [1]


def test_damaged_backup_reports_the_restored_sessions(nsm: Nsm, tmp_path: Path) -> None:
    file, other = tmp_path / "all.nsm", f"sqlite:///{tmp_path / 'other.db'}"
    first, _ = talk(nsm), talk(nsm)
    nsm("sessions", "backup", file)
    file.write_bytes(file.read_bytes()[:-100])
    result = nsm("sessions", "restore", file, "--store", other)
    assert result.exit_code == 1
    assert result.stderr.startswith("nsm: this is no backup that can be used: it was cut off after ")
    assert result.stderr.endswith("; until there: 1 written\n")
    assert [session_id for session_id, *_ in listed(nsm, other)] == [first]


def test_damaged_session_is_reported_and_the_others_are_saved(nsm: Nsm, data_dir: Path, tmp_path: Path) -> None:
    damaged, _ = talk(nsm), talk(nsm)
    with sqlite3.connect(data_dir / "sessions.db") as connection:
        connection.execute("UPDATE snapshots SET snapshot = zeroblob(100) WHERE session_id = ?", (damaged,))
    connection.close()
    result = nsm("sessions", "backup", tmp_path / "all.nsm")
    assert (result.exit_code, result.stdout) == (1, f"backup {tmp_path / 'all.nsm'}: 1 written, 1 not written\n")
    assert result.stderr.startswith(f"default/{damaged}: not written: ")
    assert "snapshot refused" in result.stderr


def snapshot_of(data_dir: Path, session_id: str) -> bytes:
    with contextlib.closing(sqlite3.connect(data_dir / "sessions.db")) as connection:
        query = "SELECT snapshot FROM snapshots WHERE session_id = ?"
        (raw,) = connection.execute(query, (session_id,)).fetchone()
    assert isinstance(raw, bytes)
    return raw


def test_X6_sessions_on_damaged_pages_are_named_and_the_others_are_saved(
    nsm: Nsm, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NSM_SNAPSHOT_TOKENS", "0")
    file, other = tmp_path / "all.nsm", f"sqlite:///{tmp_path / 'other.db'}"
    damaged, sound = talk(nsm, "Hello"), talk(nsm, "Hello again")
    damage_blob(data_dir / "sessions.db", snapshot_of(data_dir, damaged))
    damage_table(data_dir / "sessions.db", "records")
    because = "the session store is damaged or not a database ("
    reason = f"{data_dir / 'sessions.db'}: database disk image is malformed)\n"
    older = "an older backup may have it"
    lines = (
        f"default/{damaged}: not written: session '{damaged}' cannot be read; {older}: {because}{reason}"
        f"*/documents: not written: the other documents cannot be read; {older}: {because}{reason}"
    )
    result = nsm("sessions", "backup", file)
    counts = "1 written, 1 not written; documents: 1 not written\n"
    assert (result.exit_code, result.stdout, result.stderr) == (1, f"backup {file}: {counts}", lines)
    assert nsm("sessions", "restore", file, "--store", other).stdout == f"restore {file}: 1 written\n"
    assert [session_id for session_id, *_ in listed(nsm, other)] == [sound]
    result = nsm("sessions", "copy", "--to", f"sqlite:///{tmp_path / 'copy.db'}")
    assert (result.exit_code, result.stdout, result.stderr) == (1, f"copy to {tmp_path / 'copy.db'}: {counts}", lines)
    result = nsm("sessions", "verify")
    assert result.exit_code == 1
    assert result.stdout.startswith(
        f"default/{damaged}: damaged: session '{damaged}' cannot be read; save the rest with `nsm sessions backup`, "
        f"move the store's files away and restore it: {because}{reason}"
    )
    assert "\nverify: 1 same, 1 damaged" in result.stdout


def test_X6_a_store_whose_list_of_sessions_is_damaged_sends_to_the_last_backup(
    nsm: Nsm, data_dir: Path, tmp_path: Path
) -> None:
    talk(nsm)
    file, path = tmp_path / "all.nsm", data_dir / "sessions.db"
    assert nsm("sessions", "backup", file).exit_code == 0
    damage_table(path, "sessions")
    remedy = "the list of sessions cannot be read; move the store's files away and restore the last backup "
    remedy += "(docs/operations.md says what may save more): "
    reason = f"the session store is damaged or not a database ({path}: database disk image is malformed)"
    other = ("--to", f"sqlite:///{tmp_path / 'copy.db'}")
    for command in (
        ("backup", tmp_path / "new.nsm"),
        ("copy", *other),
        ("verify",),
        ("migrate", "--damaged"),
        ("list",),
    ):
        assert_one_line(nsm("sessions", *command), remedy + reason)
    assert not (tmp_path / "new.nsm").exists()
    for left in data_dir.glob("sessions.db*"):
        left.rename(tmp_path / left.name)
    assert nsm("sessions", "restore", file).stdout == f"restore {file}: 1 written\n"


@pytest.mark.skipif(shutil.which("sqlite3") is None, reason="needs the sqlite3 program")
def test_X6_sessions_whose_list_is_damaged_come_out_of_a_dump_as_the_page_says(
    nsm: Nsm, data_dir: Path, tmp_path: Path
) -> None:
    for _ in range(2):
        talk(nsm)
    damage_index(data_dir / "sessions.db", "sessions_by_age")
    file, dump, other = tmp_path / "all.nsm", tmp_path / "dump.db", f"sqlite:///{tmp_path / 'other.db'}"
    assert nsm("sessions", "backup", file).exit_code == 1
    page = Path("docs/operations.md").read_text()
    (script,) = re.findall(r"^\$ (\(sqlite3 .*?\| sqlite3 /srv/dump\.db)$", page, re.DOTALL | re.MULTILINE)
    subprocess.run(["sh", "-c", script.replace("/srv/dump.db", str(dump))], cwd=data_dir, check=True)
    assert nsm("sessions", "backup", file, "--store", f"sqlite:///{dump}").stdout == f"backup {file}: 2 written\n"
    assert nsm("sessions", "restore", file, "--store", other).stdout == f"restore {file}: 2 written\n"
    assert nsm("chat", "--session", listed(nsm, other)[0][0], "--store", other, stdin="More").exit_code == 0


def test_X6_a_session_that_damaged_pages_keep_is_named(nsm: Nsm, data_dir: Path) -> None:
    session_id, file = talk(nsm), data_dir / "sessions.db"
    damage_table(file, "log_chunks")
    message = f"session '{session_id}' was not deleted: the session store is damaged or not a database "
    assert_one_line(nsm("sessions", "delete", session_id), f"{message}({file}: database disk image is malformed)")


@pytest.mark.redis
def test_sessions_move_to_redis_and_back(nsm: Nsm, redis_single: Topology, tmp_path: Path) -> None:
    url, back = redis_single.own_url(), f"sqlite:///{tmp_path / 'back.db'}"
    session_id = talk(nsm, "Hello\nAgain")
    result = nsm("sessions", "copy", "--to", url)
    assert result.stdout == f"copy to {redis_single.url}: 1 written\n"
    assert nsm("sessions", "copy", "--to", url).stdout == f"copy to {redis_single.url}: 1 there already\n"
    assert nsm("sessions", "copy", "--from", url, "--to", back).exit_code == 0
    assert listed(nsm, url) == listed(nsm, back) == listed(nsm, "sqlite")
    again = ("chat", "--session", session_id, "--max-tokens", 6)
    answers = {nsm(*again, "--store", store, stdin="And now?").stdout for store in (url, back, "sqlite")}
    assert len(answers) == 1


def test_impossible_transfer_is_an_error_of_one_line(nsm: Nsm, data_dir: Path, tmp_path: Path) -> None:
    letters, nowhere = tmp_path / "letters", tmp_path / "no" / "all.nsm"
    letters.write_text("Dear Emma, " * 100)
    message = "this is no backup that can be used: it does not begin with the magic bytes; until there: no sessions"
    assert_one_line(nsm("sessions", "restore", letters), message)
    assert_one_line(nsm("sessions", "restore", nowhere), f"{nowhere}: No such file or directory")
    message = f"Invalid value for 'FILE': there is no directory {nowhere.parent}"
    assert_one_line(nsm("sessions", "backup", nowhere), message, status=2)
    message = f"--from and --to are the same store, {data_dir / 'sessions.db'}"
    assert_one_line(nsm("sessions", "copy", "--to", f"sqlite:///{data_dir / 'sessions.db'}"), message)
    talk(nsm)
    nsm("sessions", "delete", listed(nsm, "sqlite")[0][0])
    assert nsm("sessions", "backup", tmp_path / "all.nsm").stdout == f"backup {tmp_path / 'all.nsm'}: no sessions\n"


def test_a_source_that_is_not_there_is_not_an_empty_one(nsm: Nsm, data_dir: Path, tmp_path: Path) -> None:
    typo, file = tmp_path / "typo.db", tmp_path / "all.nsm"
    named = ("--store", f"sqlite:///{typo}")
    for command in (
        ("copy", "--from", f"sqlite:///{typo}"),
        ("backup", file, *named),
        ("verify", *named),
        ("migrate", *named),
        ("list", *named),
        ("show", "mine", *named),
        ("delete", "mine", *named),
    ):
        assert_one_line(nsm("sessions", *command), f"there is no session store {typo}")
    assert_one_line(nsm("sessions", "backup", file), f"there is no session store {data_dir / 'sessions.db'}")
    assert nsm("sessions", "list").stdout == "no sessions\n"  # the usual place may be empty
    assert not typo.exists()
    assert not file.exists()


def test_documents_are_counted_by_themselves(nsm: Nsm, data_dir: Path, tmp_path: Path) -> None:
    talk(nsm)

    async def add_documents() -> None:
        store = SqliteSessionStore(data_dir / "sessions.db")
        await store.open()
        for number in range(3):
            await records_beside(store).put(
                tenant="default", kind="item", record_id=f"i{number}", document={"n": number}, expected_version=ABSENT
            )
        await store.close()

    asyncio.run(add_documents())
    file, other = tmp_path / "all.nsm", f"sqlite:///{tmp_path / 'other.db'}"
    assert nsm("sessions", "backup", file).stdout == f"backup {file}: 1 written; documents: 3 written\n"
    output = nsm("sessions", "restore", file, "--store", other).stdout
    assert output == f"restore {file}: 1 written; documents: 3 written\n"
    output = nsm("sessions", "copy", "--to", other).stdout
    assert output == f"copy to {tmp_path / 'other.db'}: 1 there already; documents: 3 there already\n"


def test_named_states_go_along_and_are_counted_by_themselves(nsm: Nsm, tmp_path: Path) -> None:
    file, other = tmp_path / "all.nsm", f"sqlite:///{tmp_path / 'other.db'}"
    nsm("states", "create", "rules", "--text", "Once")
    nsm("states", "create", "early", "--text", "Twice", "--published")
    assert nsm("sessions", "backup", file).stdout == f"backup {file}: no sessions; named states: 2 written\n"
    nsm("states", "create", "rules", "--text", "Other", "--store", other)
    result = nsm("sessions", "restore", file, "--store", other, "--overwrite")
    assert (result.exit_code, result.stdout) == (
        0,
        f"restore {file}: no sessions; named states: 1 written, 1 skipped\n",
    )
    assert "default/state rules@1: skipped: another one has the name and version" in result.stderr
    listed = json.loads(nsm("states", "list", "--store", other, "--json").stdout)
    assert sorted(state["id"] for state in listed) == ["early@1", "rules@1"]
