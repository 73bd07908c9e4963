from __future__ import annotations

import dataclasses
import json
import re
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nsm_core.execution.native.library import variants
from nsm_core.model.identity import fingerprint
from nsm_core.state.snapshot import Snapshot
from nsm_core.tokenizer import BpeTokenizer
from tests.service.cli.conftest import Nsm, assert_one_line, id_of
from tests.service.cli.test_sessions import talk
from tests.service.cli.test_transfer import snapshot_of
from tests.support.damaged_pages import damage_blob
from tests.support.models import save_small_model
from tests.support.redis_servers import Topology


def change_state(data_dir: Path, session_id: str) -> None:
    """Half of one number of the last tensor more, under a checksum that fits."""
    with sqlite3.connect(data_dir / "sessions.db") as connection:
        where = "WHERE session_id = ?"
        (raw,) = connection.execute(f"SELECT snapshot FROM snapshots {where}", (session_id,)).fetchone()
        snapshot = Snapshot.decode(raw)
        numbers = np.frombuffer(snapshot.state[-4:], "<f4") + np.float32(0.5)
        changed = Snapshot(snapshot.header, snapshot.state[:-4] + numbers.tobytes())
        connection.execute(f"UPDATE snapshots SET snapshot = ? {where}", (changed.encode(), session_id))
    connection.close()


def test_states_of_turns_are_those_of_their_logs(nsm: Nsm) -> None:
    talk(nsm, "Hello\nAgain\nAnd once more")
    talk(nsm)
    result = nsm("sessions", "verify")
    assert result.exit_code == 0
    assert re.fullmatch(r"verify: 2 same, differing by at most \S+\n", result.stdout)
    assert nsm("sessions", "verify", "--sample", 1).stdout.startswith("verify: 1 same")


def test_divergence_names_session_and_tensor(nsm: Nsm, data_dir: Path, model_dir: Path) -> None:
    changed, whole = talk(nsm), talk(nsm)
    change_state(data_dir, changed)
    result = nsm("sessions", "verify")
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert re.fullmatch(rf"default/{changed}: diverged: layers\.1\.\S+ differs by 0\.\d+", lines[0])
    assert lines[1].startswith("verify: 1 same, 1 diverged")
    report = json.loads(nsm("sessions", "verify", "--json").stdout)
    assert (report["model_fingerprint"], report["counts"]["diverged"]) == (fingerprint(model_dir), 1)
    (session,) = report["sessions"]
    (found,) = session["divergences"]
    assert (session["id"], session["verdict"], session["tenant"]) == (changed, "diverged", "default")
    assert 0.1 < found["difference"] < 0.51
    (compared,) = report["compared"].items()
    assert (compared[0], compared[1]["num_sessions"], compared[1]["tolerance"]) == ("fp32", 2, 1e-3)
    assert compared[1]["max_difference"] < 2e-4
    assert nsm("sessions", "verify", whole).exit_code == 0
    assert nsm("sessions", "verify", changed, "--tolerance", 1).exit_code == 0
    assert_one_line(nsm("sessions", "verify", "no-such"), "session 'no-such' does not exist")


@pytest.mark.skipif(not variants(), reason="the native kernels were not built: there is no C++ compiler")
def test_session_of_two_numerics_classes_is_told_with_both_and_the_one_that_verifies(
    nsm: Nsm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NSM_SNAPSHOT_TOKENS", "0")  # each turn stores its state
    int4, int8 = {"NSM_EXECUTOR": "native-int4"}, {"NSM_EXECUTOR": "native"}
    session_id = id_of(nsm("chat", "--max-tokens", 8, stdin="Hello\nAgain", **int4).stderr)
    assert nsm("sessions", "verify", session_id, **int4).exit_code == 0
    other = nsm("sessions", "verify", session_id, "--tolerance", "1e-9", **int8)
    assert other.exit_code == 1
    made = "made by cpu/int4/native-1, verified as cpu/int8/native-1"
    assert f"; {made}: NSM_EXECUTOR=native-int4 verifies it\n" in other.stdout
    assert nsm("chat", "--session", session_id, "--max-tokens", 8, stdin="And now?", **int8).exit_code == 0
    mixed = nsm("sessions", "verify", session_id, "--tolerance", "1e-9", **int8)
    both = "made by cpu/int4/native-1 and cpu/int8/native-1, verified as cpu/int8/native-1"
    assert f"; {both}: it differs under each of them\n" in mixed.stdout
    report = json.loads(nsm("sessions", "verify", session_id, "--tolerance", "1e-9", "--json", **int8).stdout)
    assert report["numerics"] == "cpu/int8/native-1"
    assert report["sessions"][0]["earlier_numerics"] == ["cpu/int4/native-1"]
    assert (report["counts"]["diverged"], report["counts"]["several_numerics"]) == (1, 0)


def rewrite_header(data_dir: Path, session_id: str, *, position: int = 0, **fields: Any) -> None:
    """Other fields in the snapshot's header; `position`: so many tokens too far."""
    with sqlite3.connect(data_dir / "sessions.db") as connection:
        where = "WHERE session_id = ?"
        (raw,) = connection.execute(f"SELECT snapshot FROM snapshots {where}", (session_id,)).fetchone()
        found = Snapshot.decode(raw)
        header = dataclasses.replace(found.header, position=found.header.position + position, **fields)
        changed = Snapshot(header, found.state).encode()
        connection.execute(f"UPDATE snapshots SET snapshot = ? {where}", (changed, session_id))
    connection.close()


def forget_state(data_dir: Path, session_id: str) -> None:
    """As if the session were too young for a stored state."""
    with sqlite3.connect(data_dir / "sessions.db") as connection:
        where = "WHERE session_id = ?"
        connection.execute(f"DELETE FROM snapshots {where}", (session_id,))
        young = "snapshot_version = 0, snapshot_position = 0, snapshot_bytes = 0"
        connection.execute(f"UPDATE sessions SET {young} {where}", (session_id,))
    connection.close()


def make_several(data_dir: Path, session_id: str, *, position: int = 0) -> None:
    """As if another numerics class had begun the session."""
    rewrite_header(data_dir, session_id, position=position, earlier_numerics=("cpu/other/1",))


@pytest.mark.parametrize(
    ("numerics", "remedy"),
    [
        ("cpu/int4/native-1", "NSM_EXECUTOR=native-int4"),
        ("cuda/bf16/kernels-2/torch-2.9.0/NVIDIA H200", "NSM_EXECUTOR=cuda with the same torch and device"),
        ("tpu/int8/1", "its own executor"),
        ("cpu/fp32/torch-1.0.0/AVX2", "the same executor in the versions and on the device of then"),
    ],
)
def test_session_of_another_numerics_class_is_counted_apart_with_the_executor_that_verifies_it(
    nsm: Nsm, data_dir: Path, numerics: str, remedy: str
) -> None:
    session_id = talk(nsm)
    change_state(data_dir, session_id)
    rewrite_header(data_dir, session_id, numerics=numerics)
    done = nsm("sessions", "verify")
    assert done.exit_code == 3
    first, last = done.stdout.splitlines()
    assert first.startswith(f"default/{session_id}: of another numerics class, not comparable: differs by up to 0.")
    assert first.endswith(f": {remedy} verifies it")
    counted = "verify: 1 of another numerics class, not comparable"
    assert last == f"{counted}; nothing was compared: {remedy} verifies them"
    assert nsm("sessions", "verify", "--tolerance", 1e-3).exit_code == 1
    rewrite_header(data_dir, session_id, position=-1)
    assert nsm("sessions", "verify").stdout.startswith(f"default/{session_id}: diverged: ")  # no class explains that


def test_no_line_says_that_there_are_no_states_where_only_some_sessions_have_none(nsm: Nsm, data_dir: Path) -> None:
    one, other = talk(nsm), talk(nsm)
    stateless = talk(nsm)
    forget_state(data_dir, stateless)
    without = "1 without a state to compare"
    alone = nsm("sessions", "verify", stateless)
    assert alone.exit_code == 3
    assert alone.stdout.startswith(f"verify: {without}; nothing was compared: the store has no state of these")
    assert nsm("sessions", "verify", stateless, one).exit_code == 0
    for session_id in (one, other):
        change_state(data_dir, session_id)
        rewrite_header(data_dir, session_id, numerics="cuda/bf16/kernels-2")
    done = nsm("sessions", "verify")
    counted = f"verify: 2 of another numerics class, not comparable, {without}"
    assert done.stdout.splitlines()[-1] == f"{counted}; nothing was compared: NSM_EXECUTOR=cuda verifies them"
    assert done.exit_code == 3
    rewrite_header(data_dir, other, numerics="cuda/fp32/kernels-2")
    assert nsm("sessions", "verify").stdout.endswith("; nothing was compared: see the line of each session\n")
    rewrite_header(data_dir, other, position=-1)
    assert nsm("sessions", "verify").exit_code == 1


def test_a_store_without_tokens_has_nothing_to_verify(nsm: Nsm) -> None:
    nsm("sessions", "delete", talk(nsm))
    done = nsm("sessions", "verify")
    assert (done.exit_code, done.stdout) == (0, "verify: no sessions\n")


def test_sessions_of_several_numerics_classes_are_counted_apart_and_do_not_fail(nsm: Nsm, data_dir: Path) -> None:
    several, whole = talk(nsm), talk(nsm)
    change_state(data_dir, several)
    make_several(data_dir, several)
    result = nsm("sessions", "verify")
    assert result.exit_code == 0
    first, last = result.stdout.splitlines()
    assert first.startswith(f"default/{several}: of several numerics classes, not comparable: differs by up to 0.")
    assert "made by cpu/other/1 and " in first
    assert last.startswith("verify: 1 same, 1 of several numerics classes, not comparable, differing by at most ")
    done = nsm("sessions", "verify", "--json")
    report = json.loads(done.stdout)
    counts = {verdict: count for verdict, count in report["counts"].items() if count}
    assert (done.exit_code, counts) == (0, {"same": 1, "several_numerics": 1})
    assert [session["verdict"] for session in report["sessions"]] == ["several_numerics"]
    assert report["compared"]["fp32"]["num_sessions"] == 1
    assert nsm("sessions", "verify", several, "--tolerance", 1e-3).exit_code == 1
    change_state(data_dir, whole)
    assert nsm("sessions", "verify").exit_code == 1


def test_R3_damage_to_a_session_of_several_numerics_classes_stays_a_failure(nsm: Nsm, data_dir: Path) -> None:
    session_id = talk(nsm)
    change_state(data_dir, session_id)
    make_several(data_dir, session_id, position=-1)
    result = nsm("sessions", "verify")
    assert result.exit_code == 1
    assert result.stdout.startswith(f"default/{session_id}: diverged: ")
    with sqlite3.connect(data_dir / "sessions.db") as connection:
        connection.execute("UPDATE snapshots SET snapshot = zeroblob(100)")
    connection.close()
    assert nsm("sessions", "verify").exit_code == 1


def test_rounded_states_are_compared_as_rounded(nsm: Nsm, monkeypatch: pytest.MonkeyPatch) -> None:
    talk(nsm, "Hello\nAgain\nAnd once more")
    monkeypatch.setenv("NSM_STATE_DTYPE", "int8")
    session_id = talk(nsm, "Hello\nAgain\nAnd once more")
    assert "dtype int8" in nsm("sessions", "states", session_id).stdout
    result = nsm("sessions", "verify", "--tolerance", 1)  # of so few slots each is a large part of the whole
    assert result.exit_code == 0
    closest = r"differing by at most (\S+)"
    found = re.fullmatch(
        rf"verify: 2 same, {closest}, rounded to int8 and as a whole {closest}\n", result.stdout
    ) or re.fullmatch(rf"verify: 2 same, rounded to int8 and as a whole {closest}, {closest}\n", result.stdout)
    assert found is not None
    assert sorted(float(size) > 1e-3 for size in found.groups()) == [False, True]
    assert nsm("sessions", "verify", session_id, "--tolerance", "1e-5").exit_code == 1
    report = json.loads(nsm("sessions", "verify", session_id, "--json").stdout)
    assert list(report["compared"]) == ["int8"]


def test_sessions_of_another_model_move_and_go_on(nsm: Nsm, other_model_dir: Path) -> None:
    session_id = talk(nsm, "Hello\nAgain")
    old = nsm("sessions", "log", session_id, "--ids").stdout
    other = ("--model", other_model_dir)
    done = nsm("sessions", "verify", *other)
    missed = "verify: 1 of another model; nothing was compared: --model names the model that made them"
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (3, missed)
    assert nsm("sessions", "migrate", "--dry-run", *other).stdout == "would migrate: 1 migrated\n"
    assert nsm("sessions", "migrate", *other).stdout == "migrate: 1 migrated\n"
    assert nsm("sessions", "migrate", *other).stdout == "migrate: 1 left as they are\n"
    assert nsm("sessions", "log", session_id, "--ids").stdout == old
    assert nsm("sessions", "verify", *other).stdout.startswith("verify: 1 same")
    again = nsm("chat", "--session", session_id, "--max-tokens", 3, *other, stdin="And now?")
    assert (again.exit_code, nsm("sessions", "verify", *other).exit_code) == (0, 0)


def test_unmigratable_sessions_are_listed_once_and_fail_the_command(nsm: Nsm, tmp_path: Path) -> None:
    stranger = save_small_model(tmp_path / "stranger", BpeTokenizer.train(["another text"] * 4, vocab_size=280), seed=3)
    session_id = talk(nsm)
    for dry, title in ((("--dry-run",), "would migrate"), ((), "migrate")):
        result = nsm("sessions", "migrate", "--model", stranger, *dry)
        assert (result.exit_code, result.stdout) == (1, f"{title}: 1 of another tokenizer\n")
        assert result.stderr == f"default/{session_id}: of another tokenizer\n"


def test_R3_damage_is_reported_and_repaired(nsm: Nsm, data_dir: Path) -> None:
    session_id = talk(nsm)
    with sqlite3.connect(data_dir / "sessions.db") as connection:
        connection.execute("UPDATE snapshots SET snapshot = zeroblob(100)")
    connection.close()
    done = nsm("sessions", "verify")
    assert done.exit_code == 1
    assert done.stdout.startswith(f"default/{session_id}: damaged: ")
    assert nsm("sessions", "migrate", "--damaged").stdout == "migrate: 1 repaired\n"
    assert nsm("sessions", "verify").exit_code == 0


def test_X6_a_session_on_damaged_pages_is_named_and_the_others_come_to_the_model(
    nsm: Nsm, data_dir: Path, other_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NSM_SNAPSHOT_TOKENS", "0")
    talk(nsm, "Hello")
    damaged = talk(nsm, "Hello again")  # the newest, and so the first of the list
    damage_blob(data_dir / "sessions.db", snapshot_of(data_dir, damaged))
    result = nsm("sessions", "migrate", "--model", other_model_dir)
    assert (result.exit_code, result.stdout) == (1, "migrate: 1 migrated, 1 failed\n")
    failure = f"default/{damaged}: failed: session '{damaged}' cannot be read; save the rest with `nsm sessions backup`"
    assert result.stderr.startswith(failure)
    assert str(data_dir / "sessions.db") in result.stderr


@pytest.mark.redis
def test_sessions_in_redis_are_verified_and_moved(nsm: Nsm, redis_single: Topology, other_model_dir: Path) -> None:
    talk(nsm)
    store = ("--store", redis_single.own_url())
    nsm("sessions", "copy", "--to", store[1])
    assert nsm("sessions", "verify", *store).stdout.startswith("verify: 1 same")
    assert nsm("sessions", "migrate", *store, "--model", other_model_dir).stdout == "migrate: 1 migrated\n"
    assert nsm("sessions", "verify", *store, "--model", other_model_dir).stdout.startswith("verify: 1 same")
