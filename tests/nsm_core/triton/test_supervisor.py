"""On a stand-in for the server: a process that starts another one with a stub's name."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nsm_core.triton import supervisor
from nsm_core.triton.preflight import LISTENERS
from nsm_core.triton.supervisor import EXIT_KILLED, SHARED_MEMORY, children_of, free_regions, main, stubs_of
from tests.support.redis_servers import free_port

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

SERVER = """
import signal, subprocess, sys, threading
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
# as Triton does, on a thread of its own
thread = threading.Thread(target=subprocess.Popen, args=([sys.argv[1], "600"],))
thread.start()
thread.join()
while True:
    signal.pause()
"""


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def supervised(tmp_path: Path) -> subprocess.Popen[str]:
    """A supervisor whose server has a stub, or will have."""
    stub = tmp_path / "triton_python_backend_stub"
    if not stub.exists():
        stub.symlink_to(shutil.which("sleep") or "")
    command = [sys.executable, "-m", "nsm_core.triton.supervisor", f"--prefix=nsm_test_{os.getpid()}_"]
    server = [sys.executable, "-c", SERVER, str(stub), *(f"--{name}-port={free_port()}" for name in LISTENERS)]
    return subprocess.Popen([*command, *server], cwd=Path(__file__).parents[3], stderr=subprocess.PIPE, text=True)


@pytest.fixture
def process(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    with supervised(tmp_path) as process:
        until(lambda: any(stubs_of(pid)[0] for pid in children_of(process.pid)))
        yield process
        process.kill()


def message_of(process: subprocess.Popen[str]) -> str:
    """All that it said until it ended."""
    return process.communicate(timeout=60)[1]


def test_T2_a_dead_stub_ends_the_server_and_that_is_said(process: subprocess.Popen[str]) -> None:
    (server,) = children_of(process.pid)
    (stub,) = stubs_of(server)[0]
    os.kill(stub, signal.SIGKILL)
    assert (
        message_of(process)
        == "nsm triton: the process that runs the model died, or hung and was ended: ending the server\n"
    )
    assert process.returncode == EXIT_KILLED
    assert not Path(f"/proc/{server}").exists()


@pytest.mark.parametrize(
    ("number", "status", "words"),
    [
        (signal.SIGABRT, EXIT_KILLED, "the server aborted, as it does when the process that runs the model"),
        (signal.SIGKILL, 137, "the server was killed by SIGKILL"),
    ],
)
def test_T2_the_signal_that_ended_a_server_is_said(
    number: signal.Signals, status: int, words: str, process: subprocess.Popen[str]
) -> None:
    (server,) = children_of(process.pid)
    (stub,) = stubs_of(server)[0]
    os.kill(server, number)
    os.kill(stub, signal.SIGKILL)  # it holds the pipe, and would end itself if it were a real one
    assert f"nsm triton: {words}" in message_of(process)
    assert process.returncode == status


def test_a_second_server_of_the_same_prefix_frees_nothing_of_the_first(
    process: subprocess.Popen[str], tmp_path: Path
) -> None:
    region = SHARED_MEMORY / f"nsm_test_{os.getpid()}_region"
    region.touch()
    with supervised(tmp_path) as second:
        assert "another server runs, or loads its model, with the shared memory nsm_test_" in message_of(second)
    assert second.returncode == 1
    assert process.poll() is None
    assert region.exists()
    region.unlink()


def test_T7_a_signal_is_passed_on_and_the_exit_status_back(process: subprocess.Popen[str]) -> None:
    (server,) = children_of(process.pid)
    (stub,) = stubs_of(server)[0]
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 3
    until(lambda: not is_alive(stub))  # it was told as well, and this one does not handle what it is told


def test_T7_a_halted_stub_goes_on_to_end(process: subprocess.Popen[str]) -> None:
    (server,) = children_of(process.pid)
    (stub,) = stubs_of(server)[0]
    os.kill(stub, signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 3
    until(lambda: not is_alive(stub))


def is_alive(pid: int) -> bool:
    path = Path(f"/proc/{pid}/stat")
    return path.exists() and path.read_text().rpartition(") ")[2][0] != "Z"


def test_T7_a_server_that_stops_without_its_worker_is_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervisor, "WATCH_S", 0.01)
    monkeypatch.setattr(supervisor, "GONE_LIMIT_S", 0.05)
    stubs = iter([({1}, set())])
    monkeypatch.setattr(supervisor, "stubs_of", lambda _: next(stubs, (set(), set())))
    stopping = supervisor.Supervisor(["tritonserver"])
    stopping._kill_at = time.monotonic() + 3600
    with subprocess.Popen(["sleep", "600"]) as server:
        assert stopping._watch(server) == EXIT_KILLED
    assert "the process that runs the model is gone and the server does not stop" in capsys.readouterr().err


def test_T7_a_server_that_does_not_stop_in_time_is_ended() -> None:
    stopping = supervisor.Supervisor(["tritonserver"])
    stopping._kill_at = time.monotonic()
    with subprocess.Popen(["sleep", "600"]) as server:
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
