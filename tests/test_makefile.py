"""What the targets of the Makefile set up, by what `make -n` would run; nothing is installed."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def planned(venv: Path, target: str) -> str:
    """Commands that `make TARGET` would run with its environment in `venv`."""
    command = ["make", "--dry-run", "--no-print-directory", target, f"VENV={venv}", "PYTHON=python3"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def ready_files(commands: str) -> list[Path]:
    return [Path(name) for line in re.findall(r"^touch (.+)$", commands, re.MULTILINE) for name in line.split()]


@pytest.mark.parametrize(
    ("target", "lock"),
    [("serve", "scripts/serve.lock"), ("check", "requirements.lock"), ("setup", "requirements.lock")],
)
def test_target_installs_the_packages_that_it_needs_once(tmp_path: Path, target: str, lock: str) -> None:
    first = planned(tmp_path, target)
    assert re.findall(r"^scripts/setup .*?(\S+\.lock)", first, re.MULTILINE) == [lock]
    for ready in ready_files(first):
        ready.touch()
    assert "scripts/setup" not in planned(tmp_path, target)


def test_serving_starts_at_once_after_a_whole_setup_but_not_the_other_way_round(tmp_path: Path) -> None:
    servable = ready_files(planned(tmp_path, "serve"))
    for ready in servable:
        ready.touch()
    whole = planned(tmp_path, "test-fast")
    assert "requirements.lock" in whole
    for ready in servable:
        ready.unlink()
    for ready in ready_files(whole):
        ready.touch()
    assert planned(tmp_path, "serve").splitlines() == [f"{tmp_path}/bin/nsm serve "]


@pytest.mark.parametrize("has_torch", [True, False])
def test_marks_of_another_torch_go_when_one_is_installed(tmp_path: Path, has_torch: bool) -> None:
    """Else a target of the former would start with the latter. In place of Python, a script that does nothing."""
    python, marks = tmp_path / "bin" / "python", [tmp_path / f".{kind}-torch-1.0" for kind in ("ready", "servable")]
    python.parent.mkdir()
    python.write_text("#!/bin/sh\n" + ("exit 0" if has_torch else '[ "$1" != - ]  # it asks for the version') + "\n")
    python.chmod(0o755)
    for mark in marks:
        mark.touch()
    command = ["scripts/setup", str(python), str(tmp_path), "scripts/serve.lock", "1.0"]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"CXX": "true"}, capture_output=True, check=True)
    assert [mark.exists() for mark in marks] == [has_torch, has_torch]


@pytest.mark.parametrize("is_terminal", [True, False], ids=["terminal", "log"])
def test_setup_has_a_line_for_each_stage_and_says_that_it_is_at_work(tmp_path: Path, is_terminal: bool) -> None:
    """Its pip downloads 3 MB, and installs no package until a line has counted them."""
    python, go_on = tmp_path / "bin" / "python", tmp_path / "go-on"
    python.parent.mkdir()
    download = 'head -c 3000000 /dev/urandom > "$TMPDIR/package"'
    python.write_text(f'#!/bin/sh\ncase "$*" in *hashes*) {download}; read -r _ < {go_on};; esac\n')
    python.chmod(0o755)
    os.mkfifo(go_on)
    command = ["scripts/setup", str(python), str(tmp_path), "scripts/serve.lock", "1.0"]
    environ = os.environ | {"CXX": "true", "SETUP_TELL_S": "0.05"}
    master, output = pty.openpty() if is_terminal else os.pipe()
    with subprocess.Popen(command, cwd=ROOT, env=environ, stdout=output, stderr=output) as setup:
        os.close(output)
        shown = b""
        while not re.search(
            rb"^setup: still at work after \d+ s, [3-9] MB in %b\r?\n" % bytes(tmp_path), shown, re.MULTILINE
        ):
            shown += os.read(master, 4096)
        go_on.write_text("\n")
        with contextlib.suppress(OSError):  # so ends a terminal that nobody writes to any more
            while piece := os.read(master, 4096):
                shown += piece
    os.close(master)
    assert setup.returncode == 0
    assert not (tmp_path / "tmp").exists()
    assert re.findall(rb"^setup: (\d|done)", shown, re.MULTILINE) == [b"2", b"3", b"4", b"5", b"done"]
