from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from nsm_core.triton.shm_ownership import YOUNG_S, AlreadyOwned, own_directory, ownership

OWNER = """
import signal
from nsm_core.triton.shm_ownership import own_directory
with own_directory("nsm-claim-") as directory:
    print(directory, flush=True)
    signal.pause()
"""


def make_older(directory: Path) -> None:
    before = directory.stat().st_mtime - 2 * YOUNG_S
    os.utime(directory, (before, before))


def test_a_claim_is_exclusive_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with ownership(path):
        with pytest.raises(AlreadyOwned), ownership(path):
            pass
        assert path.exists()
    assert not path.exists()
    with pytest.raises(RuntimeError), ownership(path):
        raise RuntimeError
    assert not path.exists()


def test_what_a_killed_owner_left_is_no_claim(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    with ownership(tmp_path / "lock"):
        pass


def test_the_directory_of_a_killed_owner_goes_with_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of a living one, a young one and what is no directory stay."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    root = Path(__file__).parents[3]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    young, file = tmp_path / "nsm-claim-young", tmp_path / "nsm-claim-file"
    young.mkdir()
    file.touch()
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        left = Path(owner.stdout.readline().strip())
        make_older(left)
        with own_directory("nsm-claim-"):
            assert left.is_dir()
        owner.send_signal(signal.SIGKILL)
    with own_directory("nsm-claim-") as own:
        assert {*tmp_path.iterdir()} == {own, young, file}
    assert not own.exists()
