from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from nsm_core.hashing import (
    CHECKSUM_BYTES,
    checksum,
    file_identity,
    identity,
    identity_of,
    new_checksum,
    new_identity,
)

ROOT = Path(__file__).resolve().parents[2]
FIPS_180_ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
# Redis names scripts by SHA-1, and its scripts can compute no other hash
OUTSIDE = {"service/stores/redis/scripts.py", "service/stores/sessions/redis_fields.py"}


def test_identity_of_a_known_text_is_its_sha_256() -> None:
    assert identity(b"abc") == identity(memoryview(b"abc")) == FIPS_180_ABC


def test_identity_of_a_file_is_that_of_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    assert file_identity(tmp_path / "file") == FIPS_180_ABC
    with pytest.raises(OSError, match="missing"):
        file_identity(tmp_path / "missing")


def test_identity_of_texts_depends_on_their_borders() -> None:
    names = [("a", "bc"), ("ab", "c"), ("abc",), ("abc", ""), ("", "abc"), ()]
    assert len({identity_of(*name) for name in names}) == len(names)
    assert len(identity_of("é")) == 32
    assert identity_of("a", num_bytes=8) == identity_of("a")[:16]


def test_identity_that_is_fed_in_pieces_may_be_copied() -> None:
    running = new_identity("tenant", "model")
    branch = running.copy()
    for part in (b"one", b"two"):
        running.update(part)
    branch.update(b"onetwo")
    assert running.hexdigest() == branch.hexdigest()


def test_checksum_of_parts_is_that_of_the_whole() -> None:
    running = new_checksum()
    running.update(b"one")
    running.update(memoryview(b"two"))
    assert checksum(b"one", b"two") == checksum(b"onetwo") == running.digest()
    assert len(checksum()) == CHECKSUM_BYTES


def test_checksum_of_any_flipped_bit_differs() -> None:
    raw = bytes(range(64))
    flipped = {
        checksum(raw[:at] + bytes((raw[at] ^ 1 << bit,)) + raw[at + 1 :]) for at in range(64) for bit in range(8)
    }
    assert len(flipped) == 512
    assert checksum(raw) not in flipped


def test_hashing_needs_no_torch() -> None:
    code = "import sys, nsm_core.hashing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_hash_functions_are_called_in_one_module() -> None:
    found = set()
    for package in ("nsm_core", "nsm_lab", "service"):
        for path in (ROOT / package).rglob("*.py"):
            tree = ast.parse(path.read_text("utf-8"))
            names = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
            if names & {"hashlib", "xxhash"}:
                found.add(str(path.relative_to(ROOT)))
    assert found == {"nsm_core/hashing.py", *OUTSIDE}
