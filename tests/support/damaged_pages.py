"""Pages of a closed SQLite file, overwritten as by a disk that lied."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

NUM_BYTES = 512
PIECE_BYTES = 64  # of a blob, to find it by


def damage_table(path: Path, table: str) -> None:
    """Nothing of the table can be read: its first page and those of its indexes are none."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        query = "SELECT rootpage FROM sqlite_master WHERE tbl_name = ? AND rootpage > 0"  # triggers have none
        pages = connection.execute(query, (table,)).fetchall()
        page_bytes = _page_bytes(connection)
    for (page,) in pages:
        _overwrite(path, (page - 1) * page_bytes)


def damage_index(path: Path, index: str) -> None:
    """Nothing can be read by the index; its table can by others."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        (page,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (index,)).fetchone()
        page_bytes = _page_bytes(connection)
    _overwrite(path, (page - 1) * page_bytes)


def damage_blob(path: Path, blob: bytes) -> None:
    """The blob, of many pages, cannot be read to its end; all other rows can."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        page_bytes = _page_bytes(connection)
    raw = path.read_bytes()
    start = len(blob) // 2
    offsets = (raw.find(blob[at : at + PIECE_BYTES]) for at in range(start, start + 2 * PIECE_BYTES, PIECE_BYTES))
    found = max(offsets)  # one piece may go over the end of a page
    assert found > 0
    _overwrite(path, found - found % page_bytes)


def _page_bytes(connection: sqlite3.Connection) -> int:
    (num_bytes,) = connection.execute("PRAGMA page_size").fetchone()
    return int(num_bytes)


def _overwrite(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"\xff" * NUM_BYTES)
