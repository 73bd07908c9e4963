"""The container's launch command and its probes, as they are, on the machine's own Triton server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest

from nsm_core.errors import ConfigError
from nsm_core.triton.supervisor import EXIT_KILLED, children_of, free_regions, stubs_of
from service.backends.triton.dev_server import TritonServer, default_home, write_repository
from service.server import make_backend
from service.settings import load_settings
from tests.support.certificates import Authority
from tests.support.gateway import gateway
from tests.support.redis_servers import die_with_the_tests, free_port
from tests.support.triton_servers import RunningTriton, wait_until

ROOT = Path(__file__).resolve().parents[2]
TRITON = ROOT / "deploy" / "triton"
LOOPBACK = ("--grpc-address=127.0.0.1", "--metrics-address=127.0.0.1")


def installed() -> tuple[Path, dict[str, str]]:
    """Where Triton is, and an environment like that of the container: Python with the product, `nsm`, tritonserver."""
    server = TritonServer(home=default_home(), http_port=0, grpc_port=0, metrics_port=0)
    program, own = Path(server.command()[0]), server.environment()
    path = os.pathsep.join((own["PATH"], str(program.parent), str(Path(sys.executable).parent)))
    return program.parent.parent, {**own, "PATH": path}


def probe(kind: str, variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    command = [str(TRITON / "probe"), kind]
    own = {**installed()[1], **variables}
    return subprocess.run(command, env=own, capture_output=True, text=True, check=False)


def result_of(done: subprocess.CompletedProcess[str]) -> str:
    return f"{done.returncode}: {' '.join(done.stderr.split())}"


class Launched:
    """A server that deploy/triton/launch runs, with TLS and certificates on both sides, and no model yet."""

    def __init__(self, directory: Path, model_dir: Path) -> None:
        self.ours = Authority.create(directory / "ours")
        self.http_port, self.grpc_port = free_port(), free_port()
        own = self.ours.issue("server")
        write_repository(directory / "models", {"model": str(model_dir), "num_threads": "1"})
        home, inherited = installed()
        self.variables = {
            "TRITON_MODELS": str(directory / "models"),
            "TRITON_BACKENDS": str(home / "backends"),
            "TRITON_HTTP_PORT": str(self.http_port),
            "TRITON_GRPC_PORT": str(self.grpc_port),
            "TRITON_METRICS_PORT": str(free_port()),
            "TRITON_TLS_CERT": str(own.cert),
            "TRITON_TLS_KEY": str(own.key),
            "TRITON_TLS_CA": str(self.ours.ca.cert),
            "TRITON_TLS_CLIENT_CA": str(self.ours.ca.cert),
        }
        self.log = directory / "launch.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [str(TRITON / "launch"), *LOOPBACK, "--model-control-mode=explicit"],
                cwd=ROOT,
                env={**inherited, **self.variables},
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=die_with_the_tests,
            )

    def is_up(self) -> bool:
        """Triton is, whatever it serves."""
        assert self.process.poll() is None, self.log.read_text(errors="replace")
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"http://127.0.0.1:{self.http_port}/v2/health/live", verify=False).status_code == 200
        return False

    def load(self) -> None:
        url = f"http://127.0.0.1:{self.http_port}/v2/repository/models/nsm/load"
        answer = httpx.post(url, json={}, timeout=60)
        assert answer.status_code == 200, answer.text

    def probes(self, *kinds: str) -> list[str]:
        return [result_of(probe(kind, self.variables)) for kind in kinds]


@pytest.fixture
def launched(tmp_path: Path, tiny_model_dir: Path) -> Iterator[Launched]:
    server = Launched(tmp_path, tiny_model_dir)
    try:
        wait_until(server.is_up, "the start of tritonserver")
        yield server
    finally:
        server.process.kill()
        server.process.wait()
        free_regions(f"nsm_triton_{server.grpc_port}_")


@pytest.mark.triton
async def test_T2_a_launched_server_is_probed_and_serves_a_gateway_over_tls(
    launched: Launched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its model; with it; and when its worker was killed."""
    for answer in await asyncio.to_thread(launched.probes, "startup", "liveness"):
        assert answer.startswith("1: nsm: "), answer
        assert "unknown model: 'nsm'" in answer, answer

    await asyncio.to_thread(launched.load)
    well = ["0: the model made a token", "0: the model made a token", "0: the engine's loop runs"]
    assert await asyncio.to_thread(launched.probes, "startup", "readiness", "liveness") == well
    await a_gateway_needs_its_certificates(launched, tmp_path, monkeypatch)

    (stub,) = stubs_of(children_of(launched.process.pid)[0])[0]
    os.kill(stub, signal.SIGKILL)
    assert await asyncio.to_thread(launched.process.wait, 60) == EXIT_KILLED
    for answer in await asyncio.to_thread(launched.probes, "readiness", "liveness"):
        assert answer.startswith("1: nsm: the connection to the Triton server broke: unavailable"), answer


async def a_gateway_needs_its_certificates(launched: Launched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSM_TRITON_URL", f"127.0.0.1:{launched.grpc_port}")
    monkeypatch.setenv("NSM_TRITON_TLS_DIR", str(launched.ours.tls_directory(tmp_path / "tls", "gateway")))
    async with gateway(make_backend(load_settings())) as opened:
        assert (await opened.client.get("/health/ready")).status_code == 200
        body = {"prompt": "It was", "max_tokens": 3, "ignore_eos": True}
        answer = (await opened.client.post("/v1/completions", json=body)).json()
        assert answer["usage"]["completion_tokens"] == 3

    theirs = Authority.create(tmp_path / "theirs")
    monkeypatch.setattr("service.server.TRITON_WAIT_S", 0.5)
    monkeypatch.setenv("NSM_TRITON_TLS_DIR", str(theirs.tls_directory(tmp_path / "theirs-tls", "gateway")))
    backend = make_backend(load_settings())
    with pytest.raises(ConfigError, match="was not signed by the CA that this side trusts"):
        await backend.start()
    assert not backend.is_ready()


@pytest.mark.triton
def test_the_probe_of_a_server_without_tls(triton: RunningTriton) -> None:
    variables = {"TRITON_GRPC_PORT": str(triton.server.grpc_port)}
    assert probe("readiness", variables).returncode == 0
    assert probe("health", variables).returncode == 2


@pytest.fixture
def echo_options(tmp_path: Path) -> Path:
    """A place on PATH with a python3 that tells what it should run and ends: the default ports need not be free."""
    program = tmp_path / "bin" / "python3"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    return program.parent


def launch(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join((str(folder), str(Path(sys.executable).parent), os.environ["PATH"]))
    command = [str(TRITON / "launch"), *arguments]
    own = {**os.environ, "PATH": path, **variables}
    return subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, check=False)


def test_the_launch_command_of_a_container(echo_options: Path) -> None:
    done = launch(echo_options, "--log-verbose=1")
    assert done.stdout.splitlines() == [
        "-m",
        "nsm_core.triton.supervisor",
        "--prefix=nsm_triton_8001_",
        "tritonserver",
        "--model-repository=/models",
        "--disable-auto-complete-config",
        "--grpc-port=8001",
        "--http-port=8000",
        "--metrics-port=8002",
        "--exit-timeout-secs=30",
        "--http-address=0.0.0.0",
        "--log-verbose=1",
    ]
    assert done.returncode == 0


def test_with_tls_nothing_is_served_in_the_clear_beyond_the_machine(echo_options: Path) -> None:
    """But metrics."""
    options = launch(echo_options, TRITON_TLS_CERT="c", TRITON_TLS_KEY="k").stdout.splitlines()
    assert {"--grpc-use-ssl=1", "--grpc-server-cert=c", "--grpc-server-key=k"} <= set(options)
    assert "--http-address=127.0.0.1" in options
    assert not [option for option in options if "mutual" in option]
    mutual = {"TRITON_TLS_CERT": "c", "TRITON_TLS_KEY": "k", "TRITON_TLS_CLIENT_CA": "a"}
    assert {"--grpc-use-ssl-mutual=1", "--grpc-root-cert=a"} <= set(launch(echo_options, **mutual).stdout.splitlines())


@pytest.mark.parametrize(
    "variables", [{"TRITON_TLS_CERT": "c"}, {"TRITON_TLS_KEY": "k"}, {"TRITON_TLS_CLIENT_CA": "a"}], ids=str
)
def test_half_of_tls_is_refused(echo_options: Path, variables: Mapping[str, str]) -> None:
    done = launch(echo_options, **variables)
    assert done.returncode != 0
    assert "TRITON_TLS_CERT" in done.stderr
    assert not done.stdout
