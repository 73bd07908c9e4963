"""Commands of a user without a passwd entry and without HOME, as containers with an arbitrary user have."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.service.cli.conftest import NSM

REPOSITORY = Path(__file__).resolve().parents[3]
NEEDED = "nsm: NSM_DATA_DIR (--data-dir) is required: this user has no home directory for the SQLite store"
LIMIT_S = 100


def command_of(model: Path, *arguments: str, **variables: str) -> tuple[list[str], dict[str, str]]:
    """The command, under a user id that nobody has, and its whole environment."""
    own = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "NSM_MODEL": str(model)}
    return ["unshare", "--user", "--map-user=12345", "--map-group=12345", *NSM, *arguments], {**own, **variables}


def run(model: Path, cwd: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command, environ = command_of(model, *arguments, **variables)
    return subprocess.run(
        command, cwd=cwd, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S,
        check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    "arguments",
    [
        ("info",),
        ("generate", "It was", "--max-tokens", "2"),
        ("keys", "new", "--tenant", "a"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_X9_commands_that_need_no_directory_run_without_a_home(
    tmp_path: Path, model_dir: Path, arguments: tuple[str, ...]
) -> None:
    done = run(model_dir, tmp_path, *arguments)
    assert (done.returncode, "rror" in done.stderr) == (0, False), done.stderr


def test_X9_a_directory_that_is_named_needs_no_home(tmp_path: Path, model_dir: Path) -> None:
    done = run(model_dir, tmp_path, "sessions", "list", "--data-dir", "data")
    assert (done.returncode, done.stderr.strip()) == (1, f"nsm: there is no session store {tmp_path}/data/sessions.db")


@pytest.mark.parametrize(
    "arguments", [("serve", "--port", "0"), ("chat",), ("sessions", "list"), ("sessions", "verify")], ids=str
)
def test_X9_commands_that_need_one_name_the_setting(
    tmp_path: Path, model_dir: Path, arguments: tuple[str, ...]
) -> None:
    done = run(model_dir, tmp_path, *arguments)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == NEEDED


@pytest.mark.parametrize("variables", [{"NSM_STORE": "memory"}, {"NSM_DATA_DIR": "data"}], ids=str)
def test_X9_a_server_starts_without_a_home(tmp_path: Path, model_dir: Path, variables: dict[str, str]) -> None:
    command, environ = command_of(model_dir, "serve", "--port", "0", **variables)
    with subprocess.Popen(command, cwd=tmp_path, env=environ, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            assert any("serving tiny on http://" in line for line in server.stderr)
        finally:
            server.terminate()
