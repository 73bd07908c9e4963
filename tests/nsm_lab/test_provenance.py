from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from nsm_lab import provenance
from nsm_lab.provenance import command_line, source_commit


@pytest.mark.parametrize(
    ("module", "program"), [(None, "nsm"), ("nsm_lab.evaluation.__main__", "python -m nsm_lab.evaluation")]
)
def test_the_command_is_shown_without_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, module: str | None, program: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/nsm", "eval", "--data", "my books"])
    spec = None if module is None else ModuleSpec(module, loader=None)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    assert command_line() == f"{program} eval --data 'my books'"


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_commit_is_that_of_the_checkout_that_tracks_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "provenance.py"
    file.write_text("one\n")
    monkeypatch.setattr(provenance, "__file__", str(file))
    assert source_commit() is None  # no checkout

    def git(*arguments: str) -> str:
        name = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
        return subprocess.run(
            ["git", *name, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "one")
    assert source_commit() is None  # a checkout of something else
    git("add", "provenance.py")
    git("commit", "-q", "-m", "two")
    head = git("rev-parse", "--short=12", "HEAD").strip()
    assert source_commit() == head
    file.write_text("two\n")
    assert source_commit() == f"{head}-dirty"
