"""The compiler's hash of its files is remembered as long as they stay as they are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

compiler_key = pytest.importorskip("nsm_core.execution.cuda.compiler_key", reason="the compiler is not installed")


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler of one file, whose hash is its text."""
    path = tmp_path / "compiler" / "library.so"
    path.parent.mkdir()
    path.write_text("one")
    monkeypatch.setattr(compiler_key, "FILES", path.parent)
    monkeypatch.setattr(compiler_key.knobs.cache, "dir", str(tmp_path / "cache"))
    return path


def remembered(library: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, int]:
    """The key as the compiler then has it, and how often its files were read."""
    reads: list[str] = []

    def triton_key() -> str:
        reads.append(library.read_text())
        return reads[-1]

    monkeypatch.setattr(compiler_key.cache, "triton_key", triton_key)
    compiler_key.remember_key()
    return compiler_key.cache.triton_key(), len(reads)


def test_the_files_are_read_once_and_again_when_one_has_changed(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [remembered(library, monkeypatch) for _ in range(2)] == [("one", 1), ("one", 0)]
    library.write_text("other")
    assert [remembered(library, monkeypatch) for _ in range(2)] == [("other", 1), ("other", 0)]
    os.utime(library, ns=(1, 1))
    assert remembered(library, monkeypatch) == ("other", 1)


def test_a_cache_that_cannot_be_used_remembers_nothing(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").touch()
    assert [remembered(library, monkeypatch) for _ in range(2)] == [("one", 1), ("one", 1)]
