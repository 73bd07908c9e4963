"""The schema of the SQLite store, its migrations, and the way a connection is opened."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

from nsm_core.errors import ConfigError
from service.stores.sqlite.write_gate import WriteGate

APPLICATION_ID = 0x4E534D53  # "NSMS", in the file's header: says whose file this is
PAGE_BYTES = 1024  # of new files: a turn of schema 4 wrote 26 KB (benchmarks.turn_commit), with 4 KiB 74
LOCK_POLL_S = 0.005
MEMORY = ":memory:"
MEMORY_PAGE_BYTES = 32 * 1024  # measured: 16 to 32 KiB take the least of a turn
CHECKPOINT_PAGES = (
    4 * 1024 * 1024 // PAGE_BYTES
)  # 4 MiB of write-ahead log before its pages move into the file: less than the ballast

# Version 1 of the schema.
BASELINE = """
    CREATE TABLE sessions (
        tenant            TEXT    NOT NULL,
        session_id        TEXT    NOT NULL,
        version           INTEGER NOT NULL,
        position          INTEGER NOT NULL,
        created_at        REAL    NOT NULL,
        updated_at        REAL    NOT NULL,
        model_fingerprint TEXT    NOT NULL,
        metadata          TEXT    NOT NULL,
        num_log_tokens    INTEGER NOT NULL,
        snapshot_bytes    INTEGER NOT NULL,
        ttl_s             REAL,
        expires_at        REAL,
        forked_from       TEXT,
        fence             INTEGER NOT NULL DEFAULT 0,
        lease_holder      TEXT,
        lease_owner       TEXT,
        lease_expires_at  REAL    NOT NULL DEFAULT 0,
        PRIMARY KEY (tenant, session_id)
    );
    CREATE INDEX sessions_by_age ON sessions (tenant, created_at, session_id);
    CREATE INDEX sessions_by_expiry ON sessions (expires_at) WHERE expires_at IS NOT NULL;
    -- Removed because their TTL ran out: for some time their ids are answered with session_expired.
    CREATE TABLE expired_sessions (
        tenant     TEXT NOT NULL,
        session_id TEXT NOT NULL,
        expired_at REAL NOT NULL,
        PRIMARY KEY (tenant, session_id)
    );
    CREATE INDEX expired_sessions_by_age ON expired_sessions (expired_at);
    CREATE TABLE snapshots (
        tenant     TEXT    NOT NULL,
        session_id TEXT    NOT NULL,
        version    INTEGER NOT NULL,
        snapshot   BLOB    NOT NULL,
        PRIMARY KEY (tenant, session_id, version),
        FOREIGN KEY (tenant, session_id) REFERENCES sessions ON DELETE CASCADE
    );
    CREATE TABLE log_chunks (
        tenant      TEXT    NOT NULL,
        session_id  TEXT    NOT NULL,
        version     INTEGER NOT NULL,
        ids         BLOB    NOT NULL,
        num_sampled INTEGER NOT NULL,
        seed        TEXT,              -- decimal text: seeds have 64 bits and no sign
        checksum    BLOB    NOT NULL,
        PRIMARY KEY (tenant, session_id, version),
        FOREIGN KEY (tenant, session_id) REFERENCES sessions ON DELETE CASCADE
    );
    -- Older snapshots that a session retains beside its newest.
    CREATE TABLE retained_snapshots (
        tenant     TEXT    NOT NULL,
        session_id TEXT    NOT NULL,
        version    INTEGER NOT NULL,
        position   INTEGER NOT NULL,
        snapshot   BLOB    NOT NULL,
        PRIMARY KEY (tenant, session_id, version),
        FOREIGN KEY (tenant, session_id) REFERENCES sessions ON DELETE CASCADE
    );
    -- Turn records: the request, the sampled tokens and the result of each session's newest turns.
    CREATE TABLE turns (
        number           INTEGER PRIMARY KEY AUTOINCREMENT,
        tenant           TEXT    NOT NULL,
        session_id       TEXT    NOT NULL,
        turn_id          TEXT    NOT NULL,
        identity         TEXT,
        digest           TEXT    NOT NULL,
        base_version     INTEGER NOT NULL,
        status           TEXT    NOT NULL,
        request          BLOB    NOT NULL,
        result           BLOB,
        is_cancel_wanted INTEGER NOT NULL DEFAULT 0,
        expires_at       REAL,
        UNIQUE (tenant, session_id, turn_id),
        FOREIGN KEY (tenant, session_id) REFERENCES sessions ON DELETE CASCADE
    );
    CREATE INDEX turns_by_expiry ON turns (expires_at) WHERE expires_at IS NOT NULL;
    CREATE TABLE turn_chunks (
        turn_number  INTEGER NOT NULL REFERENCES turns ON DELETE CASCADE,
        chunk_number INTEGER NOT NULL,
        chunk        BLOB    NOT NULL,
        tenant       TEXT    NOT NULL,
        PRIMARY KEY (turn_number, chunk_number)
    );
    -- JSON documents beside the sessions: responses, conversations, items.
    CREATE TABLE records (
        tenant     TEXT    NOT NULL,
        kind       TEXT    NOT NULL,
        record_id  TEXT    NOT NULL,
        version    INTEGER NOT NULL,
        document   TEXT    NOT NULL,
        expires_at REAL,
        PRIMARY KEY (tenant, kind, record_id)
    );
    CREATE INDEX records_by_expiry ON records (expires_at) WHERE expires_at IS NOT NULL;
    -- Rises with each transaction: a restart compares it with the last acknowledged one (file_watch.py).
    CREATE TABLE stamp (id INTEGER PRIMARY KEY CHECK (id = 1), value INTEGER NOT NULL);
    INSERT INTO stamp VALUES (1, 0);

    CREATE TABLE usage (
        tenant       TEXT    NOT NULL PRIMARY KEY,
        num_sessions INTEGER NOT NULL,
        num_bytes    INTEGER NOT NULL
    );
    CREATE TRIGGER usage_of_new AFTER INSERT ON sessions BEGIN
        INSERT OR IGNORE INTO usage VALUES (new.tenant, 0, 0);
        UPDATE usage SET num_sessions = num_sessions + 1,
            num_bytes = num_bytes + new.snapshot_bytes + 4 * new.num_log_tokens WHERE tenant = new.tenant;
    END;
    CREATE TRIGGER usage_of_changed AFTER UPDATE OF snapshot_bytes, num_log_tokens ON sessions BEGIN
        UPDATE usage SET num_bytes = num_bytes + new.snapshot_bytes - old.snapshot_bytes
            + 4 * (new.num_log_tokens - old.num_log_tokens) WHERE tenant = new.tenant;
    END;
    CREATE TRIGGER usage_of_deleted AFTER DELETE ON sessions BEGIN
        UPDATE usage SET num_sessions = num_sessions - 1,
            num_bytes = num_bytes - old.snapshot_bytes - 4 * old.num_log_tokens WHERE tenant = old.tenant;
    END;
    CREATE TRIGGER usage_of_new_retained AFTER INSERT ON retained_snapshots BEGIN
        UPDATE usage SET num_bytes = num_bytes + length(new.snapshot) WHERE tenant = new.tenant;
    END;
    CREATE TRIGGER usage_of_deleted_retained AFTER DELETE ON retained_snapshots BEGIN
        UPDATE usage SET num_bytes = num_bytes - length(old.snapshot) WHERE tenant = old.tenant;
    END;
    CREATE TRIGGER usage_of_begun_turn AFTER INSERT ON turns BEGIN
        UPDATE usage SET num_bytes = num_bytes + length(new.request) WHERE tenant = new.tenant;
    END;
    CREATE TRIGGER usage_of_ended_turn AFTER UPDATE OF request, result ON turns BEGIN
        UPDATE usage SET num_bytes = num_bytes + length(new.request) - length(old.request)
            + coalesce(length(new.result), 0) - coalesce(length(old.result), 0) WHERE tenant = new.tenant;
    END;
    CREATE TRIGGER usage_of_deleted_turn AFTER DELETE ON turns BEGIN
        UPDATE usage SET num_bytes = num_bytes - length(old.request) - coalesce(length(old.result), 0)
            WHERE tenant = old.tenant;
    END;
    CREATE TRIGGER usage_of_new_chunk AFTER INSERT ON turn_chunks BEGIN
        UPDATE usage SET num_bytes = num_bytes + length(new.chunk) WHERE tenant = new.tenant;
    END;
    CREATE TRIGGER usage_of_deleted_chunk AFTER DELETE ON turn_chunks BEGIN
        UPDATE usage SET num_bytes = num_bytes - length(old.chunk) WHERE tenant = old.tenant;
    END;

    -- Documents are ASCII: a character is a byte.
    CREATE TABLE record_usage (tenant TEXT NOT NULL PRIMARY KEY, num_bytes INTEGER NOT NULL);
    CREATE TRIGGER usage_of_new_record AFTER INSERT ON records BEGIN
        INSERT OR IGNORE INTO record_usage VALUES (new.tenant, 0);
        UPDATE record_usage SET num_bytes = num_bytes + length(new.document) WHERE tenant = new.tenant;
    END;
    CREATE TRIGGER usage_of_changed_record AFTER UPDATE OF document ON records BEGIN
        UPDATE record_usage SET num_bytes = num_bytes + length(new.document) - length(old.document)
            WHERE tenant = new.tenant;
    END;
    CREATE TRIGGER usage_of_deleted_record AFTER DELETE ON records BEGIN
        UPDATE record_usage SET num_bytes = num_bytes - length(old.document) WHERE tenant = old.tenant;
    END;
"""

# Version 2: start states that have a name and a version, and never change.
NAMED_STATES = """
    CREATE TABLE named_states (
        tenant    TEXT    NOT NULL,
        name      TEXT    NOT NULL,
        version   INTEGER NOT NULL,
        fields    TEXT    NOT NULL,
        num_bytes INTEGER NOT NULL,
        file      BLOB    NOT NULL,
        text      TEXT,
        PRIMARY KEY (tenant, name, version)
    );
    -- A version is never given twice, also when its state was deleted.
    CREATE TABLE named_state_versions (
        tenant TEXT    NOT NULL,
        name   TEXT    NOT NULL,
        newest INTEGER NOT NULL,
        PRIMARY KEY (tenant, name)
    );
"""

# Version 3: a commit need not bring a snapshot. The head names the newest one, and has what only snapshots had before.
LOG_COMMITS = """
    ALTER TABLE sessions ADD COLUMN snapshot_version INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE sessions ADD COLUMN snapshot_position INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE sessions ADD COLUMN tokenizer_fingerprint TEXT NOT NULL DEFAULT '';
    ALTER TABLE sessions ADD COLUMN numerics TEXT NOT NULL DEFAULT '';
    ALTER TABLE sessions ADD COLUMN energy_joules REAL NOT NULL DEFAULT 0;
    UPDATE sessions SET snapshot_version = version, snapshot_position = position WHERE num_log_tokens > 0;
"""

# Version 4: all snapshots in one table, so that an older one stays where it is; a list says which those are.
ONE_TABLE_OF_SNAPSHOTS = """
    INSERT OR IGNORE INTO snapshots SELECT tenant, session_id, version, snapshot FROM retained_snapshots;
    CREATE TABLE older_snapshots (
        tenant     TEXT    NOT NULL,
        session_id TEXT    NOT NULL,
        version    INTEGER NOT NULL,
        position   INTEGER NOT NULL,
        num_bytes  INTEGER NOT NULL,
        PRIMARY KEY (tenant, session_id, version),
        FOREIGN KEY (tenant, session_id) REFERENCES sessions ON DELETE CASCADE
    ) WITHOUT ROWID;
    INSERT INTO older_snapshots
        SELECT tenant, session_id, version, position, length(snapshot) FROM retained_snapshots;
    DROP TABLE retained_snapshots;
    CREATE TRIGGER usage_of_new_older AFTER INSERT ON older_snapshots BEGIN
        UPDATE usage SET num_bytes = num_bytes + new.num_bytes WHERE tenant = new.tenant;
    END;
    CREATE TRIGGER usage_of_deleted_older AFTER DELETE ON older_snapshots BEGIN
        UPDATE usage SET num_bytes = num_bytes - old.num_bytes WHERE tenant = old.tenant;
    END;
"""

# Version 5: a turn writes fewer pages. Its record has no index by expiry and takes no number from a counter's table:
# its session says when records of it may have expired. The head also names the replica that moved it last.
FEWER_PAGES_A_TURN = """
    ALTER TABLE sessions ADD COLUMN replica TEXT NOT NULL DEFAULT '';
    ALTER TABLE sessions ADD COLUMN records_due_at REAL;
    UPDATE sessions SET records_due_at = (SELECT min(expires_at) FROM turns
        WHERE turns.tenant = sessions.tenant AND turns.session_id = sessions.session_id);
    CREATE INDEX sessions_by_due_records ON sessions (records_due_at) WHERE records_due_at IS NOT NULL;
    DROP TRIGGER usage_of_begun_turn;
    DROP TRIGGER usage_of_ended_turn;
    DROP TRIGGER usage_of_deleted_turn;
    DROP TRIGGER usage_of_new_chunk;
    DROP TRIGGER usage_of_deleted_chunk;
    ALTER TABLE turn_chunks RENAME TO old_turn_chunks;
    ALTER TABLE turns RENAME TO old_turns;
    CREATE TABLE turns (
        number           INTEGER PRIMARY KEY,
        tenant           TEXT    NOT NULL,
        session_id       TEXT    NOT NULL,
        turn_id          TEXT    NOT NULL,
        identity         TEXT,
        digest           TEXT    NOT NULL,
        base_version     INTEGER NOT NULL,
        status           TEXT    NOT NULL,
        request          BLOB    NOT NULL,
        result           BLOB,
        is_cancel_wanted INTEGER NOT NULL DEFAULT 0,
        expires_at       REAL,
        UNIQUE (tenant, session_id, turn_id),
        FOREIGN KEY (tenant, session_id) REFERENCES sessions ON DELETE CASCADE
    );
    CREATE TABLE turn_chunks (
        turn_number  INTEGER NOT NULL REFERENCES turns ON DELETE CASCADE,
        chunk_number INTEGER NOT NULL,
        chunk        BLOB    NOT NULL,
        tenant       TEXT    NOT NULL,
        PRIMARY KEY (turn_number, chunk_number)
    );
    INSERT INTO turns SELECT number, tenant, session_id, turn_id, identity, digest, base_version, status, request,
        result, is_cancel_wanted, expires_at FROM old_turns;
    INSERT INTO turn_chunks SELECT turn_number, chunk_number, chunk, tenant FROM old_turn_chunks;
    DROP TABLE old_turn_chunks;
    DROP TABLE old_turns;
    CREATE TRIGGER usage_of_begun_turn AFTER INSERT ON turns BEGIN
        UPDATE usage SET num_bytes = num_bytes + length(new.request) WHERE tenant = new.tenant;
    END;
    CREATE TRIGGER usage_of_ended_turn AFTER UPDATE OF request, result ON turns BEGIN
        UPDATE usage SET num_bytes = num_bytes + length(new.request) - length(old.request)
            + coalesce(length(new.result), 0) - coalesce(length(old.result), 0) WHERE tenant = new.tenant;
    END;
    CREATE TRIGGER usage_of_deleted_turn AFTER DELETE ON turns BEGIN
        UPDATE usage SET num_bytes = num_bytes - length(old.request) - coalesce(length(old.result), 0)
            WHERE tenant = old.tenant;
    END;
    CREATE TRIGGER usage_of_new_chunk AFTER INSERT ON turn_chunks BEGIN
        UPDATE usage SET num_bytes = num_bytes + length(new.chunk) WHERE tenant = new.tenant;
    END;
    CREATE TRIGGER usage_of_deleted_chunk AFTER DELETE ON turn_chunks BEGIN
        UPDATE usage SET num_bytes = num_bytes - length(old.chunk) WHERE tenant = old.tenant;
    END;
"""

# Version 6: a turn writes six pages, not fourteen. Rows that turns write have no index beside them: log, records and
# chunks of one session are neighbours in their tables: a row id is the session's number and a number within it. The
# running turn's record is in the session's own row, which a turn that begins writes anyway. The stamp is beside the
# usage.
NEIGHBOURING_ROWS = """
    ALTER TABLE sessions ADD COLUMN number INTEGER;
    ALTER TABLE sessions ADD COLUMN turn_id TEXT;
    ALTER TABLE sessions ADD COLUMN turn_identity TEXT;
    ALTER TABLE sessions ADD COLUMN turn_digest TEXT;
    ALTER TABLE sessions ADD COLUMN turn_base_version INTEGER;
    ALTER TABLE sessions ADD COLUMN turn_row_id INTEGER;
    ALTER TABLE sessions ADD COLUMN turn_order INTEGER;
    ALTER TABLE sessions ADD COLUMN is_cancel_wanted INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE sessions ADD COLUMN turn_request BLOB;
    UPDATE sessions SET number = rowid;
    CREATE UNIQUE INDEX sessions_by_number ON sessions (number);
    DROP TRIGGER usage_of_begun_turn;
    DROP TRIGGER usage_of_ended_turn;
    DROP TRIGGER usage_of_deleted_turn;
    DROP TRIGGER usage_of_new_chunk;
    DROP TRIGGER usage_of_deleted_chunk;
    ALTER TABLE log_chunks RENAME TO old_log_chunks;
    ALTER TABLE turn_chunks RENAME TO old_turn_chunks;
    ALTER TABLE turns RENAME TO old_turns;
    CREATE TABLE log_chunks (
        row_id      INTEGER PRIMARY KEY, -- number << 32 | version
        ids         BLOB    NOT NULL,
        num_sampled INTEGER NOT NULL,
        seed        TEXT,                -- decimal text: seeds have 64 bits and no sign
        checksum    BLOB    NOT NULL
    );
    INSERT INTO log_chunks SELECT number << 32 | old.version, ids, num_sampled, seed, checksum
        FROM old_log_chunks AS old JOIN sessions USING (tenant, session_id) ORDER BY 1;
    DROP TABLE old_log_chunks;
    -- Records of turns that have ended. `turn_order` rises with each turn of a session.
    CREATE TABLE turns (
        row_id       INTEGER PRIMARY KEY, -- number << 32 | a number below the most records of a session
        turn_order   INTEGER NOT NULL,
        tenant       TEXT    NOT NULL,
        turn_id      TEXT    NOT NULL,
        identity     TEXT,
        digest       TEXT    NOT NULL,
        base_version INTEGER NOT NULL,
        status       TEXT    NOT NULL,
        result       BLOB,
        expires_at   REAL
    );
    INSERT INTO turns SELECT
        sessions.number << 32 | row_number() OVER (PARTITION BY sessions.number ORDER BY old.number),
        old.number, tenant, old.turn_id, identity, digest, base_version, status, result, old.expires_at
        FROM old_turns AS old JOIN sessions USING (tenant, session_id) WHERE status != 'running';
    UPDATE sessions SET (turn_id, turn_identity, turn_digest, turn_base_version, turn_order, is_cancel_wanted,
        turn_request, turn_row_id) = (SELECT old.turn_id, identity, digest, base_version, old.number,
        old.is_cancel_wanted, request, sessions.number << 32 FROM old_turns AS old
        WHERE old.tenant = sessions.tenant AND old.session_id = sessions.session_id AND status = 'running')
        WHERE EXISTS (SELECT 1 FROM old_turns AS old
        WHERE old.tenant = sessions.tenant AND old.session_id = sessions.session_id AND status = 'running');
    -- What was sampled of the running turn.
    CREATE TABLE turn_chunks (
        row_id INTEGER PRIMARY KEY, -- number << 32 | a number that counts from 0
        chunk  BLOB    NOT NULL,
        tenant TEXT    NOT NULL
    );
    INSERT INTO turn_chunks SELECT sessions.number << 32 | chunk_number, chunk, old_turn_chunks.tenant
        FROM old_turn_chunks JOIN old_turns AS old ON old.number = turn_number
        JOIN sessions ON sessions.tenant = old.tenant AND sessions.session_id = old.session_id
        WHERE status = 'running' ORDER BY 1;
    DROP TABLE old_turn_chunks;
    DROP TABLE old_turns;
    CREATE TRIGGER rows_of_deleted AFTER DELETE ON sessions BEGIN
        DELETE FROM log_chunks WHERE row_id BETWEEN old.number << 32 AND old.number << 32 | 4294967295;
        DELETE FROM turns WHERE row_id BETWEEN old.number << 32 AND old.number << 32 | 4294967295;
        DELETE FROM turn_chunks WHERE row_id BETWEEN old.number << 32 AND old.number << 32 | 4294967295;
    END;
    CREATE TABLE old_usage AS SELECT * FROM usage;
    DROP TABLE usage;
    -- The row of the tenant '' has the stamp, which rises with each transaction: a restart compares it with the last
    -- acknowledged one (file_watch.py).
    CREATE TABLE usage (
        tenant       TEXT    NOT NULL PRIMARY KEY,
        num_sessions INTEGER NOT NULL,
        num_bytes    INTEGER NOT NULL,
        stamp        INTEGER NOT NULL DEFAULT 0
    ) WITHOUT ROWID;
    INSERT INTO usage SELECT tenant, num_sessions, num_bytes, 0 FROM old_usage;
    INSERT INTO usage SELECT '', 0, 0, coalesce(max(value), 0) FROM stamp;
    DROP TABLE old_usage;
    DROP TABLE stamp;
    DROP TRIGGER usage_of_new;
    CREATE TRIGGER usage_of_new AFTER INSERT ON sessions BEGIN
        INSERT OR IGNORE INTO usage VALUES (new.tenant, 0, 0, 0);
        UPDATE usage SET num_sessions = num_sessions + 1,
            num_bytes = num_bytes + new.snapshot_bytes + 4 * new.num_log_tokens WHERE tenant = new.tenant;
    END;
    DROP TRIGGER usage_of_deleted;
    CREATE TRIGGER usage_of_deleted AFTER DELETE ON sessions BEGIN
        UPDATE usage SET num_sessions = num_sessions - 1, num_bytes = num_bytes - old.snapshot_bytes
            - 4 * old.num_log_tokens - iif(length(old.turn_request) > 4096, length(old.turn_request), 0)
            WHERE tenant = old.tenant;
    END;
    -- A request that fits into the session's row is not counted: it would cost each turn the page of the usage.
    UPDATE usage SET num_bytes = num_bytes - (SELECT coalesce(sum(length(turn_request)), 0) FROM sessions
        WHERE sessions.tenant = usage.tenant AND length(turn_request) <= 4096);
    CREATE TRIGGER usage_of_request AFTER UPDATE OF turn_request ON sessions
        WHEN length(new.turn_request) > 4096 OR length(old.turn_request) > 4096 BEGIN
        UPDATE usage SET num_bytes = num_bytes + iif(length(new.turn_request) > 4096, length(new.turn_request), 0)
            - iif(length(old.turn_request) > 4096, length(old.turn_request), 0) WHERE tenant = new.tenant;
    END;
    CREATE TRIGGER usage_of_ended_turn AFTER INSERT ON turns WHEN new.result IS NOT NULL BEGIN
        UPDATE usage SET num_bytes = num_bytes + length(new.result) WHERE tenant = new.tenant;
    END;
    CREATE TRIGGER usage_of_changed_turn AFTER UPDATE OF result ON turns BEGIN
        UPDATE usage SET num_bytes = num_bytes + coalesce(length(new.result), 0) - coalesce(length(old.result), 0)
            WHERE tenant = new.tenant;
    END;
    CREATE TRIGGER usage_of_deleted_turn AFTER DELETE ON turns WHEN old.result IS NOT NULL BEGIN
        UPDATE usage SET num_bytes = num_bytes - length(old.result) WHERE tenant = old.tenant;
    END;
    CREATE TRIGGER usage_of_new_chunk AFTER INSERT ON turn_chunks BEGIN
        UPDATE usage SET num_bytes = num_bytes + length(new.chunk) WHERE tenant = new.tenant;
    END;
    CREATE TRIGGER usage_of_deleted_chunk AFTER DELETE ON turn_chunks BEGIN
        UPDATE usage SET num_bytes = num_bytes - length(old.chunk) WHERE tenant = old.tenant;
    END;
"""

# Entry i brings a file from version i to version i + 1. A released entry never changes: files were made with it.
MIGRATIONS: tuple[str, ...] = (
    *(BASELINE, NAMED_STATES, LOG_COMMITS, ONE_TABLE_OF_SNAPSHOTS),
    *(FEWER_PAGES_A_TURN, NEIGHBOURING_ROWS),
)

PRAGMAS = f"""
    PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES};
    PRAGMA journal_size_limit = {CHECKPOINT_PAGES * PAGE_BYTES};
    -- FULL, not NORMAL: with NORMAL a kill loses nothing, but a power cut may take back turns that were acknowledged.
    -- It costs an fsync a turn: a 2.2 MB commit took 3.9 ms instead of 2.5 (p50 of benchmarks.session_store on a
    -- virtual disk); a turn takes hundreds.
    PRAGMA synchronous = FULL;
    PRAGMA foreign_keys = ON;
    -- Room for all pages of a commit: the pages that a state leaves and those that the next one takes are the same, and
    -- go to the log once. 16 MiB, at most, for each connection.
    PRAGMA cache_size = -16384;
    -- A deleted session's bytes are overwritten, not just forgotten.
    PRAGMA secure_delete = ON;
"""


class StoreConnection(sqlite3.Connection):
    """`waits_for_lock`: whether a transaction waits while another process writes. `gate`: of its transactions.
    `patience_s`: the wait for a lock of another process.

    It remembers what its pragmas are set to: to set one takes a statement, and a turn makes few.
    """

    waits_for_lock = True
    gate: WriteGate | None = None
    patience_s = 0.0
    _is_synced = _is_patient = True

    def set_synced(self, is_synced: bool) -> None:
        """Whether the next transactions wait for the disk."""
        if is_synced != self._is_synced:
            self.execute(f"PRAGMA synchronous = {'FULL' if is_synced else 'NORMAL'}")
            self._is_synced = is_synced

    def set_patient(self, is_patient: bool) -> None:
        """Whether SQLite itself waits for a lock, with pauses that grow to 0.1 s."""
        if is_patient != self._is_patient:
            self.execute(f"PRAGMA busy_timeout = {round(1e3 * self.patience_s) if is_patient else 0}")
            self._is_patient = is_patient

    def close(self) -> None:
        super().close()
        if self.gate is not None:
            self.gate.close()


def create_file(path: Path) -> None:
    """The database file, readable by its owner only, and a directory like it if there is none."""
    if not path.parent.exists():
        path.parent.mkdir(parents=True, exist_ok=True)  # another process may make it at the same moment
        path.parent.chmod(0o700)
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))


def connect(path: Path, *, busy_timeout_s: float) -> sqlite3.Connection:
    """A connection that commits durably; transactions are begun and ended by hand.

    Raises ConfigError for a file of another program, which stays as it is.
    """
    connection = sqlite3.connect(
        path, timeout=busy_timeout_s, isolation_level=None, check_same_thread=False, factory=StoreConnection
    )
    connection.gate, connection.patience_s = WriteGate(path), busy_timeout_s
    try:
        _refuse_foreign_file(connection, path)
        _use_write_ahead_log(connection, patience_s=busy_timeout_s)
        connection.executescript(PRAGMAS)
    except BaseException:
        connection.close()
        raise
    return connection


def connect_memory() -> sqlite3.Connection:
    """A connection to a new database in memory, with the newest schema."""
    connection = sqlite3.connect(MEMORY, isolation_level=None, check_same_thread=False)
    connection.executescript(
        f"PRAGMA page_size = {MEMORY_PAGE_BYTES}; PRAGMA secure_delete = OFF; PRAGMA foreign_keys = ON"
    )
    migrate(connection, Path(MEMORY))
    return connection


def _use_write_ahead_log(connection: sqlite3.Connection, *, patience_s: float) -> None:
    """A new file gets pages of PAGE_BYTES and a write-ahead log; one that has a log keeps both.

    Where two processes begin on a new file at once, SQLite fails one of them there and then, whatever its timeout.
    """
    connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
    last_try = time.monotonic() + patience_s
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if not is_busy(error) or time.monotonic() > last_try:
                raise
        time.sleep(LOCK_POLL_S)


def is_busy(error: sqlite3.Error) -> bool:
    """Whether another connection has a lock: the low byte is the primary code."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    return code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _refuse_foreign_file(connection: sqlite3.Connection, path: Path) -> None:
    # In this order: another process may write both between the two, in one transaction
    (num_tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    (application_id,) = connection.execute("PRAGMA application_id").fetchone()
    if application_id != APPLICATION_ID and num_tables:
        raise ConfigError(
            f"{path} is a database of another program: choose another file with NSM_STORE or NSM_DATA_DIR"
        )


def page_bytes(connection: sqlite3.Connection) -> int:
    """Of this file, which may be older than PAGE_BYTES."""
    (num_bytes,) = connection.execute("PRAGMA page_size").fetchone()
    return int(num_bytes)


def migrate(connection: sqlite3.Connection, path: Path) -> None:
    """Brings the file to the newest schema, in one transaction.

    Raises ConfigError for a file of a schema that this build does not know.
    """
    connection.execute("BEGIN IMMEDIATE")
    try:
        found = _schema_version(connection, path)
        for version, script in enumerate(MIGRATIONS[found:], start=found + 1):
            for statement in _statements(script):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {version}")
        if not found:
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # SQLite ends it by itself on a full disk
            connection.execute("ROLLBACK")
        raise


def _schema_version(connection: sqlite3.Connection, path: Path) -> int:
    """The schema of the file, 0 for an empty one. Raises ConfigError."""
    (found,) = connection.execute("PRAGMA user_version").fetchone()
    (num_tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if not (1 if num_tables else 0) <= found <= len(MIGRATIONS):
        raise ConfigError(f"{path} has schema version {found}, this build knows versions 1 to {len(MIGRATIONS)}")
    return int(found)


def _statements(script: str) -> Iterator[str]:
    """One by one: `executescript` would end the transaction. A trigger has semicolons inside."""
    statement = ""
    for part in script.split(";"):
        statement += part + ";"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
