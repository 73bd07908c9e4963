"""Connections of one file wait at a gate for each other; it decides nothing."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.stores.sqlite.connection import LockTaken, not_waiting, transaction
from service.stores.sqlite.schema import connect, create_file, migrate
from service.stores.sqlite.write_gate import WriteGate

ADD = "INSERT INTO expired_sessions VALUES ('a', 'b', 0)"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions.db"


@pytest.fixture
def connection(path: Path) -> Iterator[sqlite3.Connection]:
    create_file(path)
    with contextlib.closing(connect(path, busy_timeout_s=0.05)) as made:
        migrate(made, path)
        yield made


@pytest.fixture
def other_gate(path: Path, connection: sqlite3.Connection) -> Iterator[WriteGate]:
    """Of another connection of the file."""
    gate = WriteGate(path)
    yield gate
    gate.close()


def num_rows(connection: sqlite3.Connection) -> int:
    (number,) = connection.execute("SELECT count(*) FROM expired_sessions").fetchone()
    return int(number)


def test_gate_is_closed_to_others_while_a_transaction_runs(
    connection: sqlite3.Connection, other_gate: WriteGate
) -> None:
    with transaction(connection):
        assert not other_gate.try_enter()
    assert other_gate.try_enter()


def test_a_part_of_a_transaction_leaves_the_gate_closed(connection: sqlite3.Connection, other_gate: WriteGate) -> None:
    with transaction(connection):
        with transaction(connection):
            connection.execute(ADD)
        assert not other_gate.try_enter()


def test_a_transaction_that_fails_opens_the_gate(connection: sqlite3.Connection, other_gate: WriteGate) -> None:
    with pytest.raises(ValueError, match="no"), transaction(connection):
        raise ValueError("no")
    assert other_gate.try_enter()


def test_a_closed_gate_holds_nobody_up_who_can_have_the_lock(
    path: Path, connection: sqlite3.Connection, other_gate: WriteGate
) -> None:
    assert other_gate.try_enter()
    with transaction(connection):
        connection.execute(ADD)
    assert num_rows(connection) == 1
    with contextlib.closing(WriteGate(path)) as third:
        assert not third.try_enter()  # it is still the other one's


def test_who_does_not_wait_stops_at_the_gate(connection: sqlite3.Connection, other_gate: WriteGate) -> None:
    assert other_gate.try_enter()
    with pytest.raises(LockTaken), not_waiting(connection), transaction(connection):
        connection.execute(ADD)
    other_gate.leave()
    with not_waiting(connection), transaction(connection):
        connection.execute(ADD)
    assert num_rows(connection) == 1


def test_who_waits_in_vain_for_the_lock_opens_the_gate(
    path: Path, connection: sqlite3.Connection, other_gate: WriteGate
) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as foreign:
        foreign.execute("BEGIN IMMEDIATE")
        with pytest.raises(sqlite3.OperationalError, match="locked"), transaction(connection):
            pass
    assert other_gate.try_enter()


def test_a_connection_that_closes_opens_the_gate(path: Path, connection: sqlite3.Connection) -> None:
    first, second = WriteGate(path), WriteGate(path)
    assert first.try_enter()
    assert not second.try_enter()
    first.close()
    assert second.try_enter()
    second.close()


def test_without_a_log_the_gate_is_open(tmp_path: Path) -> None:
    gate = WriteGate(tmp_path / "none.db")
    assert gate.try_enter()
    gate.leave()
    gate.close()
