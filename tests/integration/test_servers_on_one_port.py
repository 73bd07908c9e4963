"""Two `nsm serve` on one port at the same moment: one serves, the other says that the port is taken and ends."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.server_processes import REPOSITORY

# The other server has the port between this one's `bind` and its `listen`
SCRIPT = """
import sys
from service import server
from service.cli.main import main

bind = server.bind

def bind_and_wait(host, port):
    sock = bind(host, port)
    print("bound", flush=True)
    sys.stdin.readline()
    return sock

server.bind = bind_and_wait
sys.argv[1:] = ["serve"]
main()
"""


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_server_that_listens_second_ends_with_one_line_that_names_the_port(
    tiny_model_dir: Path, tmp_path: Path, num_workers: int
) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        settings = {"MODEL": tiny_model_dir, "DATA_DIR": tmp_path, "PORT": port, "WORKERS": num_workers}
        environment = {name: value for name, value in os.environ.items() if not name.startswith("NSM_")}
        environment |= {f"NSM_{name}": str(value) for name, value in (settings | {"DEVICE": "cpu"}).items()}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        command = (sys.executable, "-c", SCRIPT)
        with subprocess.Popen(command, cwd=REPOSITORY, env=environment, text=True, **pipes) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "bound\n"
            other.listen()
            try:
                _, errors = process.communicate("\n", timeout=120)
            finally:
                process.kill()
    line = f"port {port} on 127.0.0.1 is already in use; choose another with --port or NSM_PORT"
    assert process.returncode == 1
    assert errors.splitlines()[-1] == f"nsm: {line}"
    assert errors.count(line) == 1
    assert "serving" not in errors
    assert "Traceback" not in errors
