"""The `nsm` command in this process, on a small random model and a data directory of its own."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from nsm_core.tokenizer import Tokenizer
from service.cli.commands import app
from tests.support.models import save_small_model

# Runs the command; the data directory is the test's own, and no other NSM_* variable is set.
Nsm = Callable[..., Result]
NSM = [sys.executable, "-c", "from service.cli.main import main; main()"]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Tokenizer) -> Path:
    return save_small_model(tmp_path_factory.mktemp("models") / "tiny", tiny_tokenizer, seed=1)


@pytest.fixture(scope="session")
def other_model_dir(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Tokenizer) -> Path:
    return save_small_model(tmp_path_factory.mktemp("models") / "other", tiny_tokenizer, seed=2)


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, model_dir: Path, data_dir: Path) -> None:
    """Of commands in this process and of those in their own."""
    for name in [name for name in os.environ if name.startswith("NSM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NSM_MODEL", str(model_dir))
    monkeypatch.setenv("NSM_DATA_DIR", str(data_dir))
    monkeypatch.setenv("NSM_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    # this process's log is pytest's: a handler would stay, with a standard error that is closed after the command
    monkeypatch.setattr("service.cli.serve.configure_logging", lambda *options: None)


@pytest.fixture
def nsm() -> Nsm:
    def run(*args: str | Path | int, stdin: str | bytes | None = None, **environ: str) -> Result:
        return CliRunner(env=environ).invoke(app, [str(arg) for arg in args], input=stdin, catch_exceptions=False)

    return run


def assert_one_line(result: Any, message: str, *, status: int = 1) -> None:
    """The command failed with this line on standard error, and nothing else there."""
    assert result.stderr == f"nsm: {message}\n"
    assert result.exit_code == status


def no_model(path: object) -> str:
    """The message for a path where nothing is."""
    names = "pulse-books, pulse-books-keyed, pulse-books-small"
    return f"no model {path}: expected a model's file or directory, or the name of a bundled model ({names})"


def id_of(stderr: str) -> str:
    """The session of a chat, as its last line tells how to come back to it."""
    found = re.search(r"--session (sess_[0-9a-f]{32})\n\Z", stderr)
    assert found is not None, stderr
    return found[1]
