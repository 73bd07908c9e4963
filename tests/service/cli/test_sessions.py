from __future__ import annotations

import json
import sqlite3
from pathlib import Path

from nsm_core.model.identity import fingerprint
from nsm_core.tokenizer import Tokenizer
from tests.service.cli.conftest import Nsm, assert_one_line, id_of


def talk(nsm: Nsm, text: str = "Hello") -> str:
    return id_of(nsm("chat", "--max-tokens", 4, stdin=text).stderr)


def test_list_shows_the_newest_first(nsm: Nsm, model_dir: Path) -> None:
    ids = [talk(nsm), talk(nsm, "Hello\nAgain"), talk(nsm)]
    listed = json.loads(nsm("sessions", "list", "--json").stdout)
    assert [session["id"] for session in listed] == ids[::-1]
    assert [session["version"] for session in listed] == [1, 2, 1]
    lines = nsm("sessions", "list").stdout.splitlines()
    assert lines[0].split() == ["session", "version", "position", "state", "last", "turn", "model"]
    assert [line.split()[:3] for line in lines[1:]] == [
        [session["id"], str(session["version"]), str(session["position"])] for session in listed
    ]
    assert all(line.rstrip().endswith(fingerprint(model_dir)[:12]) for line in lines[1:])


def test_list_reads_as_many_pages_as_it_needs(nsm: Nsm, data_dir: Path) -> None:
    talk(nsm)
    with sqlite3.connect(data_dir / "sessions.db") as connection:
        connection.row_factory = sqlite3.Row
        (row,) = connection.execute("SELECT * FROM sessions").fetchall()
        for index in range(230):
            changed = {
                "session_id": f"s{index}",
                "number": row["number"] + 1 + index,
                "created_at": index,
                "updated_at": index,
            }
            copy = {**row, **changed, "version": 0, "position": 0}
            marks = ", ".join(f":{name}" for name in copy)
            connection.execute(f"INSERT INTO sessions ({', '.join(copy)}) VALUES ({marks})", copy)
    connection.close()
    assert len(json.loads(nsm("sessions", "list", "--json").stdout)) == 20
    ids = [session["id"] for session in json.loads(nsm("sessions", "list", "--limit", 225, "--json").stdout)]
    assert ids[1:] == [f"s{number}" for number in range(229, 5, -1)]


def test_empty_store_is_reported(nsm: Nsm) -> None:
    assert nsm("sessions", "list").stdout == "no sessions\n"


def test_show_prints_position_and_size(nsm: Nsm, model_dir: Path) -> None:
    session_id = talk(nsm)
    head = json.loads(nsm("sessions", "show", session_id, "--json").stdout)
    assert head["id"] == session_id
    assert head["version"] == 1
    assert head["num_log_tokens"] - head["position"] in (0, 1)
    assert head["model_fingerprint"] == fingerprint(model_dir)
    shown = nsm("sessions", "show", session_id).stdout
    assert f"position   {head['position']} (tokens read)" in shown


def test_log_gives_text_and_ids(nsm: Nsm, tiny_tokenizer: Tokenizer) -> None:
    session_id = talk(nsm, "Hello, naïve façade")
    ids = [int(word) for word in nsm("sessions", "log", session_id, "--ids").stdout.split()]
    text = nsm("sessions", "log", session_id).stdout
    assert text == tiny_tokenizer.decode(ids) + "\n"
    assert text.startswith("User: Hello, naïve façade\n\nAssistant:")
    assert json.loads(nsm("sessions", "log", session_id, "--json").stdout) == {
        "id": session_id, "ids": ids, "text": text[:-1]
    }  # fmt: skip


def test_a_log_is_read_with_another_model_of_the_same_tokenizer(nsm: Nsm, other_model_dir: Path) -> None:
    session_id = talk(nsm)
    own, other = (nsm("sessions", "log", session_id, *more) for more in ((), ("--model", other_model_dir)))
    assert own.stdout == other.stdout != ""


def test_a_log_is_not_read_with_another_models_tokenizer(nsm: Nsm) -> None:
    session_id, other_model_dir = talk(nsm), "pulse-books-small"
    result = nsm("sessions", "log", session_id, "--model", other_model_dir)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"nsm: session {session_id} was made by model ")
    assert result.stderr.endswith("name the right one with --model, or print token ids with --ids\n")
    assert nsm("sessions", "log", session_id, "--model", other_model_dir, "--ids").exit_code == 0


def test_delete_leaves_the_others(nsm: Nsm) -> None:
    gone, remaining = talk(nsm), talk(nsm)
    assert nsm("sessions", "delete", gone).stdout == f"deleted {gone}\n"
    assert [session["id"] for session in json.loads(nsm("sessions", "list", "--json").stdout)] == [remaining]
    for command in (("show",), ("log",), ("log", "--ids"), ("delete",)):
        assert_one_line(nsm("sessions", *command, gone), f"session '{gone}' does not exist")


def test_a_memory_store_cannot_be_looked_into(nsm: Nsm) -> None:
    message = "sessions of a memory store are in the server's process; NSM_STORE=sqlite keeps them in a file"
    assert_one_line(nsm("sessions", "list", NSM_STORE="memory"), message)
    assert_one_line(nsm("sessions", "list", "--store", "memory"), message)


def test_a_store_that_cannot_be_used_is_named(nsm: Nsm, tmp_path: Path) -> None:
    file = tmp_path / "letters.db"
    file.write_text("Dear Emma, " * 1000)
    result = nsm("sessions", "list", "--store", f"sqlite:///{file}")
    remedy = "name another one, or move the store's files away and restore the last backup "
    remedy += "(docs/operations.md says what may save more)"
    reason = f"the session store is damaged or not a database ({file}: file is not a database)"
    assert_one_line(result, f"the store cannot be opened; {remedy}: {reason}")
    result = nsm("sessions", "list", "--data-dir", file)
    assert_one_line(result, f"sessions cannot be stored in {file} (NSM_DATA_DIR, NSM_STORE): {file} is not a directory")


def test_another_tenants_sessions_are_seen_under_its_name_only(nsm: Nsm, data_dir: Path) -> None:
    session_id = talk(nsm)
    with sqlite3.connect(data_dir / "sessions.db") as connection:
        for (table,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            if "tenant" in [column[1] for column in connection.execute(f"PRAGMA table_info({table})")]:
                connection.execute(f"UPDATE {table} SET tenant = 'acme' WHERE tenant = 'default'")
    connection.close()
    assert nsm("sessions", "list").stdout == "no sessions\n"
    (listed,) = json.loads(nsm("sessions", "list", "--tenant", "acme", "--json").stdout)
    assert listed["id"] == session_id
    for command in (("show",), ("log", "--ids"), ("delete",)):
        assert_one_line(nsm("sessions", *command, session_id), f"session '{session_id}' does not exist")
        assert nsm("sessions", *command, session_id, "--tenant", "acme").exit_code == 0
    assert nsm("sessions", "list", "--tenant", "acme").stdout == "no sessions\n"
