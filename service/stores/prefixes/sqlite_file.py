"""The file of the SQLite prefixes: opened, made again when its schema is another one or it is damaged."""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
from pathlib import Path

from nsm_core.errors import NsmError, StorageFull, StoreUnavailable
from service.stores.sqlite.connection import ConnectionThread
from service.stores.sqlite.schema import is_busy, use_write_ahead_log

logger = logging.getLogger("nsm.prefixes")

APPLICATION_ID = 0x4E534D50  # "NSMP", in the file's header: says whose file this is
SCHEMA = 1
MAGIC = b"SQLite format 3\0"
APPLICATION_ID_AT = 68  # of the file, 4 bytes, big endian
BUSY_TIMEOUT_S = 5.0
PAGE_BYTES = 16 * 1024

PRAGMAS = """
    -- No fsync per entry: a power cut may take the newest ones back, and that is all it does.
    PRAGMA synchronous = NORMAL;
    PRAGMA journal_size_limit = 8388608;
    PRAGMA foreign_keys = ON;
    -- These are prompts: what is dropped is overwritten.
    PRAGMA secure_delete = ON;
"""
TABLES = f"""
    BEGIN IMMEDIATE;
    CREATE TABLE IF NOT EXISTS prefixes (
        id        INTEGER PRIMARY KEY,
        tenant    TEXT    NOT NULL,
        family    TEXT    NOT NULL,
        position  INTEGER NOT NULL,
        digest    TEXT    NOT NULL,
        num_bytes INTEGER NOT NULL,
        used_at   REAL    NOT NULL,
        UNIQUE (tenant, family, position, digest)
    );
    CREATE INDEX IF NOT EXISTS prefixes_by_use ON prefixes (tenant, used_at, num_bytes);
    -- Apart from the names, which many lookups read and few follow.
    CREATE TABLE IF NOT EXISTS entries (
        id    INTEGER PRIMARY KEY REFERENCES prefixes ON DELETE CASCADE,
        entry BLOB NOT NULL
    );
    PRAGMA application_id = {APPLICATION_ID};
    PRAGMA user_version = {SCHEMA};
    COMMIT;
"""


def file_thread(path: Path) -> ConnectionThread:
    """A connection to the file in a thread of its own."""
    return ConnectionThread("prefixes", connect=lambda: connect(path), translate=_translate)


def _translate(error: sqlite3.Error) -> NsmError:
    if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL:
        return StorageFull("the disk of the stored prefixes is full")
    return StoreUnavailable(f"the stored prefixes cannot be used ({error})")


def connect(path: Path) -> sqlite3.Connection:
    """Transactions are begun and ended by hand."""
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    try:
        use_write_ahead_log(connection, page_bytes=PAGE_BYTES, patience_s=BUSY_TIMEOUT_S)
        connection.executescript(PRAGMAS)
    except BaseException:
        connection.close()
        raise
    return connection


def prepare_file(path: Path) -> None:
    """A file of this build's schema, readable by its owner only. A damaged one of ours, or of another build, is made
    again, empty: it is a cache. Raises StoreUnavailable for what is not ours, which stays as it is.
    """
    try:
        if not path.parent.exists():
            path.parent.mkdir(parents=True)
            path.parent.chmod(0o700)
        if path.exists() and path.stat().st_size and not _is_ours(path):
            raise StoreUnavailable(f"{path} is a file of another program")
        try:
            _create(path)
        except sqlite3.DatabaseError as error:
            if is_busy(error):  # it is another process's, and whole
                raise
            logger.warning("the stored prefixes in %s cannot be read (%s); starting without them", path, error)
            _delete(path)
            _create(path)
    except (OSError, sqlite3.Error) as error:
        raise StoreUnavailable(f"cannot create {path}: {error}") from error


def _is_ours(path: Path) -> bool:
    """By its header, which a damaged file may still have."""
    with path.open("rb") as file:
        header = file.read(APPLICATION_ID_AT + 4)
    application_id = int.from_bytes(header[APPLICATION_ID_AT:], "big")
    return header.startswith(MAGIC) and (application_id == APPLICATION_ID or (not application_id and _is_new(path)))


def _is_new(path: Path) -> bool:
    """Whether another process is making it: what it has written may still be in the write-ahead log alone."""
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=BUSY_TIMEOUT_S)) as connection:
            (num_tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            return not num_tables or connection.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
    except sqlite3.DatabaseError:
        return False


def _create(path: Path) -> None:
    """Raises sqlite3.DatabaseError for a damaged file, or one of another schema."""
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    with contextlib.closing(connect(path)) as connection:
        (found,) = connection.execute("PRAGMA user_version").fetchone()
        if found not in (0, SCHEMA):
            raise sqlite3.DatabaseError(f"schema {found}, this build knows {SCHEMA}")
        connection.executescript(TABLES)
        (problem,) = connection.execute("PRAGMA quick_check('prefixes')").fetchone()  # entries have checksums
        if problem != "ok":
            raise sqlite3.DatabaseError(problem)


def _delete(path: Path) -> None:
    for name in (path, path.with_name(path.name + "-wal"), path.with_name(path.name + "-shm")):
        name.unlink(missing_ok=True)
