from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from nsm_core.errors import ConfigError
from service.backends.triton.dev_server import REPOSITORY, ServerTls, TritonServer, write_repository
from tests.support.certificates import Authority
from tests.support.redis_servers import free_port
from tests.support.triton_servers import wait_until


@pytest.fixture
def server(tmp_path: Path) -> TritonServer:
    """Of an installation that holds nothing but an empty program."""
    home = tmp_path / "home"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    program = home / "lib" / version / "site-packages" / "pytriton" / "tritonserver" / "bin" / "tritonserver"
    program.parent.mkdir(parents=True)
    program.touch()
    return TritonServer(home=home, repository=tmp_path / "repository", http_port=1, grpc_port=2, metrics_port=3)


def test_the_command_names_ports_repository_and_no_other_address(server: TritonServer) -> None:
    program, *options = server.command()
    assert program.startswith(str(server.home))
    assert {"--http-port=1", "--grpc-port=2", "--metrics-port=3"} <= set(options)
    assert {"--http-address=127.0.0.1", "--grpc-address=127.0.0.1", "--metrics-address=127.0.0.1"} <= set(options)
    assert f"--model-repository={server.repository}" in options


def test_with_tls_only_grpc_is_there_for_others(server: TritonServer, tmp_path: Path) -> None:
    authority = Authority.create(tmp_path / "ca")
    own = authority.issue("server")
    files = [own.cert, own.key, authority.ca.cert]
    tls = ServerTls.of(cert=files[0], key=files[1], client_ca=files[2])
    options = dataclasses.replace(server, host="0.0.0.0", tls=tls).command()
    assert {"--grpc-use-ssl=1", f"--grpc-server-cert={files[0]}", f"--grpc-server-key={files[1]}"} <= set(options)
    assert {"--grpc-use-ssl-mutual=1", f"--grpc-root-cert={files[2]}"} <= set(options)
    assert {"--grpc-address=0.0.0.0", "--http-address=127.0.0.1"} <= set(options)


def test_tls_is_whole_or_not_there(tmp_path: Path) -> None:
    assert ServerTls.of(cert=None, key=None, client_ca=None) is None
    for given in ({"cert": tmp_path}, {"key": tmp_path}, {"client_ca": tmp_path}):
        with pytest.raises(ConfigError, match="needs a certificate and its key"):
            ServerTls.of(**{"cert": None, "key": None, "client_ca": None, **given})


def test_tls_files_are_checked_before_a_server_starts(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path / "ca")
    own, another, junk = authority.issue("server"), authority.issue("another"), tmp_path / "junk.pem"
    junk.write_text("junk")
    for cert, key in ((junk, junk), (own.cert, another.key), (own.cert, tmp_path / "nowhere.key")):
        with pytest.raises(ConfigError, match="are no certificate and its key"):
            ServerTls.of(cert=cert, key=key, client_ca=None)
    with pytest.raises(ConfigError, match=r"junk\.pem is no file with certificates of a CA"):
        ServerTls.of(cert=own.cert, key=own.key, client_ca=junk)


def test_the_environment_leads_to_the_servers_own_python(server: TritonServer) -> None:
    environment = server.environment()
    assert environment["PATH"].split(os.pathsep)[0] == str(server.home / "bin")
    assert environment["HOME"] == os.environ["HOME"]


def test_a_server_that_is_not_installed_is_told(tmp_path: Path) -> None:
    server = TritonServer(home=tmp_path, http_port=1, grpc_port=2, metrics_port=3)
    with pytest.raises(ConfigError, match="scripts/triton-server installs one"):
        server.command()


def test_a_repository_with_other_parameters(tmp_path: Path) -> None:
    write_repository(tmp_path / "copy", {"model": 'a "b" \\c', "max_slots": "3"})
    config = (tmp_path / "copy" / "nsm" / "config.pbtxt").read_text("utf-8")
    assert 'key: "max_slots" value { string_value: "3" }' in config
    assert r'key: "model" value { string_value: "a \"b\" \\c" }' in config
    original = (REPOSITORY / "nsm" / "config.pbtxt").read_text("utf-8")
    assert len(config.splitlines()) == len(original.splitlines())
    assert (tmp_path / "copy" / "nsm" / "1" / "model.py").exists()


@pytest.mark.parametrize(
    ("parameters", "message"),
    [({"max_slot": "3"}, "unknown parameter max_slot"), ({"max_slots": "x"}, "max_slots must be a whole number")],
)
def test_a_bad_parameter_is_told_before_a_server_starts(
    parameters: dict[str, str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        write_repository(tmp_path / "copy", parameters)


def test_a_repository_is_required(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no model nsm"):
        write_repository(tmp_path / "copy", {}, source=tmp_path)


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "nsm"), "triton", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("serve", "--parameter", "max_slots"), "must be NAME=VALUE, got 'max_slots'"),
        (("probe", "liveness", "--tls-name", "triton"), "needed with the other --tls options"),
        (("probe", "liveness", "--tls-ca", "nowhere"), "nowhere is no file with certificates of a CA"),
        (("serve", "--home", "nowhere"), "there is no Triton server in nowhere: scripts/triton-server installs one"),
    ],
)
def test_the_command_line_tells_what_is_wrong(arguments: tuple[str, ...], message: str) -> None:
    done = run_cli(*arguments)
    assert done.returncode != 0
    assert message in " ".join(done.stderr.split())


@pytest.mark.triton
def test_serve_runs_until_it_is_told_to_stop(tiny_model_dir: Path, tmp_path: Path) -> None:
    """With TLS for gRPC, and HTTP in the clear on loopback."""
    authority = Authority.create(tmp_path / "ca")
    own = authority.issue("server")
    ports = [str(free_port()) for _ in range(3)]
    options = ["--grpc-port", ports[0], "--http-port", ports[1], "--metrics-port", ports[2]]
    options += ["--model", str(tiny_model_dir), "--parameter", "num_threads=1"]
    options += ["--tls-cert", str(own.cert), "--tls-key", str(own.key)]
    command = [str(Path(sys.executable).parent / "nsm"), "triton", "serve", *options]
    log = tmp_path / "triton.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    url = f"http://127.0.0.1:{ports[1]}/v2/models/nsm"

    def is_ready() -> bool:
        assert process.poll() is None
        try:
            return httpx.get(f"{url}/ready", verify=False).status_code == 200
        except httpx.TransportError:
            return False

    try:
        wait_until(is_ready, "the start of the server")
        body = {"text_input": "It was", "max_tokens": 2, "ignore_eos": True}
        assert len(httpx.post(f"{url}/generate", json=body).json()["token_ids"]) == 2
        asked = run_cli("probe", "readiness", "--url", f"localhost:{ports[0]}", "--tls-ca", str(authority.ca.cert))
        assert asked.returncode == 0, asked.stderr
        assert "the model made a token" in asked.stderr
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0, log.read_text(errors="replace")
    finally:
        process.kill()
