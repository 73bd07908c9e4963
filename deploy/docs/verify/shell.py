"""One shell for a page, in a folder of its own: what one command sets or starts is there for the next."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[3]
READERS_HOME = "/home/ada"
READERS_FOLDERS = ("tmp", "srv")
END = "__end_of_command__"


class Shell:
    """`with` it: bash, with the checkout's files at hand, a home and a data directory of its own, and a free port."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = _free_port()
        for entry in ROOT.iterdir():
            if entry.name not in (".git", "build"):
                (folder / entry.name).symlink_to(entry)
        for name in READERS_FOLDERS:
            (folder / name).mkdir()

    def __enter__(self) -> Shell:
        self.start()
        return self

    def start(self) -> None:
        """Anew, in the same folder, after a command that did not end."""
        self._process = subprocess.Popen(
            ["/bin/bash", "--norc", "--noprofile"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, cwd=self.folder, env=self._environment(), start_new_session=True, errors="replace",
        )  # fmt: skip

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._end()

    def _end(self) -> None:
        """Of the shell, and of all that was started in it."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def run(self, command: str, *, limit_s: float) -> tuple[int, str]:
        """Exit status and output. Raises TimeoutError: the shell is of no use after that."""
        pipe, output = self._process.stdin, self._process.stdout
        if pipe is None or output is None:
            raise RuntimeError("the shell has no pipes")
        timer = threading.Timer(limit_s, os.killpg, (self._process.pid, signal.SIGKILL))
        timer.start()
        try:
            pipe.write(f"{command}\nprintf '\\n%s %s\\n' {END} $?\n")
            pipe.flush()
            lines = []
            for line in output:
                if line.startswith(END):
                    return int(line.split()[1]), "".join(lines)
                lines.append(line)
        except BrokenPipeError:
            pass
        finally:
            timer.cancel()
        self._end()
        raise TimeoutError(f"more than {limit_s:g} s, or the end of the shell")

    def as_run(self, command: str) -> str:
        """The pages' server is on port 8000, and their files in /tmp and /srv."""
        own = command.replace("/tmp/", f"{self.folder}/tmp/").replace("/srv/", f"{self.folder}/srv/")  # noqa: S108
        return own.replace(":8000", f":{self.port}")

    def as_shown(self, printed: str) -> str:
        """And the reader of the pages is Ada."""
        text = printed.replace(f":{self.port}", ":8000")
        for name in READERS_FOLDERS:
            text = text.replace(f"{self.folder}/{name}/", f"/{name}/")
        return text.replace(str(self.folder), READERS_HOME)

    def _environment(self) -> Mapping[str, str]:
        own = {name: value for name, value in os.environ.items() if not name.startswith(("NSM_", "XDG_"))}
        path = f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}"
        return {
            **own,
            "PATH": path,
            "HOME": str(self.folder),
            "NSM_PORT": str(self.port),
            "COLUMNS": "200",
            "PYTHONUNBUFFERED": "1",
        }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
