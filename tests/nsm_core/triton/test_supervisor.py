"""On a stand-in for the server: a process that starts another one with a stub's name."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nsm_core.triton import supervisor
from nsm_core.triton.supervisor import EXIT_KILLED, children_of, free_regions, main, stubs_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

SERVER = """
import signal, subprocess, sys, threading
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
# as Triton does, on a thread of its own
thread = threading.Thread(target=subprocess.Popen, args=([sys.argv[1], "60"],))
thread.start()
thread.join()
while True:
    signal.pause()
"""


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def process(tmp_path: Path) -> subprocess.Popen[bytes]:
    """A supervisor whose server has a stub."""
    stub = tmp_path / "triton_python_backend_stub"
    stub.symlink_to(shutil.which("sleep") or "")
    command = [sys.executable, "-m", "nsm_core.triton.supervisor", "--prefix=nsm_test_"]
    process = subprocess.Popen([*command, sys.executable, "-c", SERVER, stub], cwd=Path(__file__).parents[3])
    until(lambda: any(stubs_of(pid)[0] for pid in children_of(process.pid)))
    return process


def test_T2_a_dead_stub_ends_the_server(process: subprocess.Popen[bytes]) -> None:
    (server,) = children_of(process.pid)
    (stub,) = stubs_of(server)[0]
    os.kill(stub, signal.SIGKILL)
    assert process.wait(20) == EXIT_KILLED
    assert not Path(f"/proc/{server}").exists()


def test_T2_a_server_that_aborts_is_told_as_one_that_was_ended(process: subprocess.Popen[bytes]) -> None:
    (server,) = children_of(process.pid)
    os.kill(server, signal.SIGABRT)
    assert process.wait(20) == EXIT_KILLED


def test_T7_a_signal_is_passed_on_and_the_exit_status_back(process: subprocess.Popen[bytes]) -> None:
    (server,) = children_of(process.pid)
    (stub,) = stubs_of(server)[0]
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 3
    until(lambda: not is_alive(stub))  # it was told as well, and this one does not handle what it is told


def is_alive(pid: int) -> bool:
    path = Path(f"/proc/{pid}/stat")
    return path.exists() and path.read_text().rpartition(") ")[2][0] != "Z"


def test_T7_a_server_that_does_not_stop_in_time_is_ended() -> None:
    stopping = supervisor.Supervisor(["tritonserver"])
    stopping._kill_at = time.monotonic()
    with subprocess.Popen(["sleep", "60"]) as server:
        assert stopping._watch(server) == EXIT_KILLED


def test_regions_of_the_same_prefix_are_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "SHARED_MEMORY", tmp_path)
    for name in ("nsm_triton_1", "nsm_triton_2", "another"):
        (tmp_path / name).touch()
    free_regions("nsm_triton_")
    assert [path.name for path in tmp_path.iterdir()] == ["another"]


def test_a_command_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--prefix=x"], ["--prefix=", "tritonserver"]):
        assert main(arguments) == 2
    assert "supervisor [--prefix=NAME] tritonserver" in capsys.readouterr().err
