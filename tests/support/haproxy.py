"""HAProxy in front of a server: connections to it are kept and shared by all clients."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.support.redis_servers import die_with_the_tests, free_port, wait_until

SERVER = "gateway"
NO_SERVER = "<NOSRV>"  # HAProxy's name where it answered itself
CONFIGURATION = """
global
  log stdout format raw local0
  maxconn 256
defaults
  mode http
  log global
  log-format "%s %HP"
  timeout connect 5s
  timeout client 15s
  timeout server 15s
  timeout http-request 15s
  http-reuse always
frontend clients
  bind 127.0.0.1:{port}
  default_backend gateways
backend gateways
  server {server} {address}
"""


@dataclasses.dataclass(frozen=True)
class HaProxy:
    """`url`: where clients reach it; `log`: a line for each request that has ended."""

    url: str
    log: Path

    def asked(self) -> list[tuple[str, str]]:
        """The server, or NO_SERVER, and the target of each request that has ended."""
        lines = (line.split(" ", 1) for line in self.log.read_text().splitlines())
        return [(line[0], line[1]) for line in lines if line[0] in (SERVER, NO_SERVER)]


@contextlib.contextmanager
def haproxy(directory: Path, address: str) -> Iterator[HaProxy]:
    """In front of the server at `address`, host:port."""
    directory.mkdir()
    port = free_port()
    configuration, log = directory / "haproxy.cfg", directory / "log"
    configuration.write_text(CONFIGURATION.format(port=port, server=SERVER, address=address))
    with log.open("wb") as out:
        started = subprocess.Popen(
            ["haproxy", "-db", "-f", str(configuration)], stdout=out, stderr=out, preexec_fn=die_with_the_tests
        )
    try:
        proxy = HaProxy(f"http://127.0.0.1:{port}", log)
        wait_until(lambda: _listens(port), "the start of haproxy")
        yield proxy
    finally:
        started.kill()
        started.wait()


def _listens(port: int) -> bool:
    """Without a request: the server behind it may run in this very thread."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False
