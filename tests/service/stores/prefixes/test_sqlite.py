"""The file of the SQLite prefixes: damage costs the cache and nothing else; other programs' files stay."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest

from nsm_core.errors import StorageFull, StoreUnavailable
from service.stores.prefixes import sqlite_file
from service.stores.prefixes.base import PrefixBounds, PrefixKey
from service.stores.prefixes.sqlite import SqlitePrefixStore

BOUNDS = PrefixBounds(max_bytes=10_000_000, max_tenant_bytes=10_000_000, ttl_s=60.0)
KEY = PrefixKey(family="f", position=64, digest="d")


def store_at(path: Path, *, min_free_bytes: int = 0) -> SqlitePrefixStore:
    return SqlitePrefixStore(path, BOUNDS, min_free_bytes=min_free_bytes)


async def fill(path: Path) -> None:
    store = store_at(path)
    await store.open()
    for number in range(20):
        await store.put(tenant="a", key=PrefixKey(family="f", position=number, digest="d"), entry=bytes(50_000))
    await store.close()


async def is_usable(path: Path) -> bool:
    store = store_at(path)
    await store.open()
    await store.put(tenant="a", key=KEY, entry=b"entry")
    found = await store.load(tenant="a", key=KEY)
    await store.close()
    return found == b"entry"


async def test_only_its_owner_reads_the_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "prefixes.db"
    await fill(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


async def test_a_damaged_file_or_one_of_another_schema_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "prefixes.db"
    await fill(path)
    raw = bytearray(path.read_bytes())
    raw[100 : 5 * 16384] = bytes(5 * 16384 - 100)
    path.write_bytes(raw)
    assert await is_usable(path)
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    assert await is_usable(path)


@pytest.mark.parametrize("content", [b"a diary", b"SQLite format 3\0" + bytes(84)])
async def test_a_file_of_another_program_stays_as_it_is(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "prefixes.db"
    path.write_bytes(content)
    store = store_at(path)
    with pytest.raises(StoreUnavailable, match="another program"):
        await store.open()
    with pytest.raises(StoreUnavailable):
        await store.find(tenant="a", family="f")
    assert path.read_bytes() == content


@pytest.mark.parametrize("script", ["", sqlite_file.TABLES], ids=["begun", "made"])
def test_a_file_that_another_process_is_making_is_ours(script: str, tmp_path: Path) -> None:
    """Its mark is not in the file yet: at most in the write-ahead log."""
    path = tmp_path / "prefixes.db"
    with contextlib.closing(sqlite_file.connect(path)) as other:
        other.executescript(script)
        assert path.read_bytes()[68:72] == bytes(4)
        sqlite_file.prepare_file(path)
        assert other.execute("SELECT count(*) FROM prefixes").fetchone() == (0,)


async def test_a_cache_does_not_take_the_disks_last_room(tmp_path: Path) -> None:
    store = store_at(tmp_path / "prefixes.db", min_free_bytes=2**62)
    await store.open()
    with pytest.raises(StorageFull):
        await store.put(tenant="a", key=KEY, entry=b"entry")
    assert await store.find(tenant="a", family="f") == ()
    await store.close()


async def test_what_is_dropped_is_not_left_in_the_file(tmp_path: Path) -> None:
    path, secret = tmp_path / "prefixes.db", b"a prompt that nobody else may read " * 20
    store = store_at(path)
    await store.open()
    await store.put(tenant="a", key=KEY, entry=secret)
    await store.remove(tenant="a", key=KEY)
    await store.close()
    left = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert secret[:70] not in left
