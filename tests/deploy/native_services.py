"""What docker-compose.yml starts in containers, as processes of this machine: from the same configuration files."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.deploy.compose import ROOT
from tests.support.redis_servers import die_with_the_tests, free_port, wait_until
from tests.support.server_processes import SERVE

REDIS = ROOT / "deploy" / "redis"
NGINX = ROOT / "deploy" / "nginx" / "nginx.conf.template"
GATEWAY_START_S = 180.0  # two that load torch at once, on cores that other tests use too


@contextlib.contextmanager
def process(
    command: Sequence[object], log: Path, *, ended_by: signal.Signals = signal.SIGKILL, **variables: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Ended at the end. `variables`: added to this process's own environment, from which NSM_* is taken away."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("NSM_")}
    with log.open("wb") as out:
        started = subprocess.Popen(
            [str(word) for word in command],
            cwd=ROOT,
            env={**own, **variables},
            stdout=out,
            stderr=out,
            preexec_fn=die_with_the_tests,
        )
    try:
        yield started
    finally:
        started.send_signal(ended_by)
        started.wait()


def answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url, verify=False).status_code == 200
    return False


@dataclasses.dataclass(frozen=True)
class Redis:
    process: subprocess.Popen[bytes]
    port: int
    password: str
    variables: Mapping[str, str]

    @property
    def url(self) -> str:
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"

    def client(self, password: str | None) -> redis.Redis:
        return redis.Redis(port=self.port, password=password, socket_timeout=5.0, retry=Retry(NoBackoff(), 0))

    def shown(self) -> str:
        """What a list of processes shows of it, and what its environment holds."""
        folder = Path(f"/proc/{self.process.pid}")
        return (folder / "cmdline").read_text() + (folder / "environ").read_text()

    def health(self) -> int:
        """The exit status of the container's health check."""
        command = [str(REDIS / "healthy")]
        return subprocess.run(command, env={**os.environ, **self.variables}, check=False).returncode


@contextlib.contextmanager
def redis_service(directory: Path) -> Iterator[Redis]:
    port, password = free_port(), "0123456789abcdef"
    directory.mkdir()
    variables = {"REDIS_PASSWORD": password, "REDIS_PORT": str(port)}
    own = {"REDIS_BIND": "127.0.0.1", "REDIS_DIR": str(directory), "REDIS_MAXMEMORY": "256mb"}
    with process([REDIS / "start"], directory / "log", **variables, **own) as started:
        service = Redis(started, port, password, variables)
        with service.client(password) as client:
            wait_until(lambda: bool(client.ping()), "the start of redis-server")
        yield service


@dataclasses.dataclass(frozen=True)
class GatewayProcess:
    process: subprocess.Popen[bytes]
    address: str  # host:port
    log: Path

    def wait_ready(self) -> None:
        deadline = time.monotonic() + GATEWAY_START_S
        while not answers(f"http://{self.address}/health/ready"):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the gateway did not start:\n{self.log.read_text()}")
            time.sleep(0.05)  # another program's start: there is nothing to await


@contextlib.contextmanager
def gateway_services(directory: Path, number: int, store: str, model: Path) -> Iterator[list[GatewayProcess]]:
    """So many gateways that share a store; they start side by side."""
    directory.mkdir()
    with contextlib.ExitStack() as stack:
        gateways = []
        for index in range(number):
            port = free_port()
            own = {"PORT": port, "STORE": store, "MODEL": model, "NUM_THREADS": 1, "DATA_DIR": directory, "GRACE_S": 1}
            variables = {f"NSM_{name}": str(value) for name, value in own.items()}
            log = directory / f"{index}.log"
            started = stack.enter_context(process([sys.executable, "-c", SERVE], log, **variables))
            gateways.append(GatewayProcess(started, f"127.0.0.1:{port}", log))
        for one in gateways:
            one.wait_ready()
        yield gateways


@dataclasses.dataclass(frozen=True)
class Proxy:
    url: str
    log: Path

    def asked(self) -> list[dict[str, object]]:
        """Its access log: a value for each request that has ended."""
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]


def filled_in(template: str, variables: Mapping[str, str]) -> str:
    """As `envsubst` does it in the container: only names that are set, so that nginx's own variables stay."""
    for name, value in variables.items():
        template = template.replace(f"${{{name}}}", value)
    return template


@contextlib.contextmanager
def proxy_service(directory: Path, gateways: Sequence[str]) -> Iterator[Proxy]:
    """`gateways`: host:port of each."""
    directory.mkdir()
    port = free_port()
    variables = {
        "NGINX_LISTEN": f"127.0.0.1:{port}",
        "NGINX_DIR": str(directory),
        "NGINX_UPSTREAM": " ".join(f"server {address} fail_timeout=1s;" for address in gateways),
    }
    config = directory / "nginx.conf"
    config.write_text(filled_in(NGINX.read_text(), variables))
    # As root it would give its workers to a user who may not read the tests' folders.
    main = "daemon off;" if os.geteuid() else "daemon off; user root;"
    log = directory / "log"
    with process(
        ["nginx", "-e", "stderr", "-p", directory, "-c", config, "-g", main], log, ended_by=signal.SIGTERM
    ):  # killed, it would leave its workers
        wait_until(lambda: _listens(port), "the start of nginx")
        yield Proxy(f"http://127.0.0.1:{port}", log)


def _listens(port: int) -> bool:
    with contextlib.suppress(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{port}/metrics")  # the proxy answers this one itself
        return True
    return False
