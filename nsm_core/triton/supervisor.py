"""Runs a Triton server so that a dead worker is noticed.

`python -m nsm_core.triton.supervisor [--prefix=NAME] tritonserver OPTION…`

When the process that runs the model dies, Triton mostly keeps its connections, answers "ready", lets running streams
hang for ever and starts no new process. So the server is ended at once: clients see broken connections, and whoever
watches this process starts it anew. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from nsm_core.errors import ConfigError
from nsm_core.triton.preflight import check_command
from nsm_core.triton.shm_ownership import AlreadyOwned, ownership
from nsm_core.triton.stop_signal import STOP_SIGNAL

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # where Triton itself has it
DEFAULT_PREFIX = "nsm_triton_"
STUB = "triton_python_backend_stub"[:15]  # as much as the kernel keeps of a name
WATCH_S = 0.5
GONE_LIMIT_S = 15.0  # a server without its model's process has little left to do, but a busy machine may take long
STOP_LIMIT_S = 45.0  # above Triton's own exit time-out, after which it was seen to hang
EXIT_KILLED = 70  # EX_SOFTWARE
EXIT_SIGNALLED = 128  # as shells count
PR_SET_PDEATHSIG = 1


class Supervisor:
    """One server. `prefix` of its shared memory, which no other may have: what an earlier one with the same left behind
    is freed first. Standard error says why a server ended.
    """

    def __init__(
        self, command: Sequence[str], *, prefix: str = DEFAULT_PREFIX, environment: Mapping[str, str] | None = None
    ) -> None:
        self._command = [*command, f"--backend-config=python,shm-region-prefix-name={prefix}"]
        self._prefix = prefix
        self._environment = environment
        self._kill_at: float | None = None  # once it was asked to stop

    def run(self) -> int:
        """Until the server ends: its exit status; EXIT_KILLED where the process that runs the model was lost or nothing
        else helped; EXIT_SIGNALLED and the number of a signal that somebody else sent it. SIGTERM and SIGINT end it in
        good order. Raises ConfigError where it cannot start.
        """
        check_command(self._command)
        try:
            with ownership(SHARED_MEMORY / f".{self._prefix}lock"):
                return self._run()
        except AlreadyOwned:
            message = f"another server runs, or loads its model, with the shared memory {self._prefix}*"
            raise ConfigError(f"{message}: give this one a gRPC port of its own") from None

    def _run(self) -> int:
        free_regions(self._prefix)
        try:
            # a group of its own: Ctrl-C comes from here alone, once
            with subprocess.Popen(
                self._command, env=self._environment, process_group=0, preexec_fn=_die_with_the_parent
            ) as server:
                for number in (signal.SIGTERM, signal.SIGINT):
                    signal.signal(number, lambda number, _: self._stop(server, number))
                return self._watch(server)
        finally:
            free_regions(self._prefix)

    def _stop(self, server: subprocess.Popen[bytes], number: int) -> None:
        self._kill_at = self._kill_at or time.monotonic() + STOP_LIMIT_S
        for stub in stubs_of(server.pid)[0]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(stub, STOP_SIGNAL)
                os.kill(stub, signal.SIGCONT)  # one that somebody halted would not end, nor the server without it
        server.send_signal(number)

    def _watch(self, server: subprocess.Popen[bytes]) -> int:
        seen: set[int] = set()
        gone_at: float | None = None
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._ended(server.wait(WATCH_S))
            alive, dead = stubs_of(server.pid)
            seen |= alive
            is_gone = bool(dead or seen - alive)
            if is_gone and self._kill_at is None:
                _report("the process that runs the model died, or hung and was ended: ending the server")
                return _kill(server)
            if is_gone:
                gone_at = gone_at or time.monotonic()
            if gone_at is not None and time.monotonic() > gone_at + GONE_LIMIT_S:
                _report("the process that runs the model is gone and the server does not stop: ending it")
                return _kill(server)
            if self._kill_at is not None and time.monotonic() > self._kill_at:
                _report(f"the server did not stop within {STOP_LIMIT_S:g} s: ending it")
                return _kill(server)

    def _ended(self, status: int) -> int:
        """`status`: of Popen, below 0 for a signal."""
        if status == -signal.SIGABRT:
            _report("the server aborted, as it does when the process that runs the model is killed or hangs")
            return EXIT_KILLED
        if status < 0:
            _report(f"the server was killed by {signal.Signals(-status).name}")
            return EXIT_SIGNALLED - status
        if status > 0 or self._kill_at is None:
            _report(f"the server ended with status {status}, its log tells why")
        return status


def _report(text: str) -> None:
    sys.stderr.write(f"nsm triton: {text}\n")


def _kill(server: subprocess.Popen[bytes]) -> int:
    server.kill()
    server.wait()
    return EXIT_KILLED


def stubs_of(server_pid: int) -> tuple[set[int], set[int]]:
    """The processes that run the server's models: the living, and those that ended and were not waited for."""
    alive: set[int] = set()
    dead: set[int] = set()
    for pid in children_of(server_pid):
        with contextlib.suppress(OSError):  # it went between the two looks
            name, _, fields = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(") ")
            if name == STUB:
                (dead if fields[0] == "Z" else alive).add(pid)
    return alive, dead


def children_of(pid: int) -> list[int]:
    """Whichever of its threads started them."""
    children: list[int] = []
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):  # the thread ended between the two looks
            children += map(int, (thread / "children").read_text().split())
    return children


def free_regions(prefix: str) -> None:
    """Shared memory outlives the processes that were killed."""
    for region in SHARED_MEMORY.glob(f"{prefix}*"):
        with contextlib.suppress(FileNotFoundError):
            region.unlink()


def _die_with_the_parent() -> None:
    """In the server's process: it must not outlive a supervisor that was killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main(arguments: Sequence[str]) -> int:
    """`--prefix` first, then the server's command line."""
    prefix, command = DEFAULT_PREFIX, list(arguments)
    if command and command[0].startswith("--prefix="):
        prefix = command.pop(0).partition("=")[2]
    if not command or not prefix:
        sys.stderr.write(__doc__ or "")
        return 2
    try:
        return Supervisor(command, prefix=prefix).run()
    except ConfigError as error:
        _report(str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
