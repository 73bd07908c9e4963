"""Directories of processes that were killed are removed by a later start, those of processes that live are not."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from service.owned_directory import LOCK_FILE, owned_directory, remove_abandoned

HOLD = """
import sys
from service.owned_directory import owned_directory
with owned_directory() as directory:
    print(directory, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


def test_directory_of_a_killed_process_is_removed_by_the_next_and_not_before(parent: Path) -> None:
    command = [sys.executable, "-c", HOLD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        left = Path(process.stdout.readline().strip())
        (left / "metrics").mkdir()
        remove_abandoned(parent)
        assert left.is_dir()
        process.send_signal(signal.SIGKILL)
    assert left.is_dir()
    with owned_directory() as own:
        assert list(parent.iterdir()) == [own]
    assert list(parent.iterdir()) == []


def test_directory_without_a_lock_file_or_behind_a_link_stays(
    parent: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / LOCK_FILE).touch()
    (parent / "nsm-link").symlink_to(elsewhere)
    (parent / "nsm-other").mkdir()
    remove_abandoned(parent)
    assert (elsewhere / LOCK_FILE).exists()
    assert (parent / "nsm-other").is_dir()
