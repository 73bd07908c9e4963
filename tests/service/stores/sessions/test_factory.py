"""Where sessions cannot be stored is known before a model is loaded."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nsm_core.errors import ConfigError, StoreUnavailable
from service.settings import Settings
from service.stores.sessions.factory import make_store


def test_X23_a_data_directory_that_is_a_dangling_link_is_named(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"NSM_DATA_DIR.*symbolic link to nothing"):
        make_store(Settings(data_dir=link))


def test_X23_a_data_directory_below_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"NSM_DATA_DIR.*not a directory"):
        make_store(Settings(data_dir=tmp_path / "file" / "below"))


def test_X23_a_read_only_directory_with_a_store_is_named_with_what_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sessions.db").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)  # as a mount that is read-only has it
    with pytest.raises(ConfigError, match=r"sessions\.db cannot be opened in .*not writable, .*copy sessions\.db\*"):
        make_store(Settings(data_dir=tmp_path))
    with pytest.raises(ConfigError, match=r"cannot be stored in .*/new \(NSM_DATA_DIR.* is not writable$"):
        make_store(Settings(data_dir=tmp_path / "new"))


async def test_X23_a_directory_that_cannot_be_made_is_named() -> None:
    store = make_store(Settings(data_dir=Path("/proc/nope")))  # where even root makes no directory
    with pytest.raises(StoreUnavailable, match="cannot create the directory /proc/nope of the session store: No such"):
        await store.open()


def test_a_data_directory_may_be_missing_with_its_parents(tmp_path: Path) -> None:
    make_store(Settings(data_dir=tmp_path / "a" / "b"))
