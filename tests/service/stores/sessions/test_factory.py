"""Where sessions cannot be stored is known before a model is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsm_core.errors import ConfigError
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


def test_a_data_directory_may_be_missing_with_its_parents(tmp_path: Path) -> None:
    make_store(Settings(data_dir=tmp_path / "a" / "b"))
