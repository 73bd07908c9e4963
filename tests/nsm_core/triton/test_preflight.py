from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsm_core.errors import ConfigError
from nsm_core.triton.preflight import check_command
from tests.support.certificates import Authority
from tests.support.redis_servers import free_port


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock.getsockname()[1]


def command(**ports: int) -> list[str]:
    given = {name: ports.get(name) or free_port() for name in ("grpc", "http", "metrics")}
    options = [(f"--{name}-port={port}", f"--{name}-address=127.0.0.1") for name, port in given.items()]
    return ["tritonserver", *(option for pair in options for option in pair)]


def test_free_ports_pass() -> None:
    check_command(command())


@pytest.mark.parametrize("listener", ["grpc", "http", "metrics"])
def test_a_busy_port_is_told_with_its_option(listener: str, busy_port: int) -> None:
    message = f"cannot listen on 127.0.0.1:{busy_port} (--{listener}-port): Address already in use"
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_command(command(**{listener: busy_port}))


def test_metrics_are_looked_for_where_http_is(busy_port: int) -> None:
    given = [option for option in command(metrics=busy_port) if not option.startswith("--metrics-address")]
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1.*metrics-port"):
        check_command(given)


def test_one_port_for_two_is_refused() -> None:
    port = free_port()
    with pytest.raises(ConfigError, match=f"--grpc-port and --metrics-port are both {port}"):
        check_command(command(grpc=port, metrics=port))


def test_an_address_of_another_machine_is_told() -> None:
    given = [option.replace("--grpc-address=127.0.0.1", "--grpc-address=192.0.2.1") for option in command()]
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:\d+ \(--grpc-port\)"):
        check_command(given)


def test_tls_files_of_no_use_are_told(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path / "ca")
    own, junk = authority.issue("server"), tmp_path / "junk.pem"
    junk.write_text("junk")
    tls = ["--grpc-use-ssl=1", f"--grpc-server-cert={own.cert}", f"--grpc-server-key={own.key}"]
    check_command([*command(), *tls, f"--grpc-root-cert={authority.ca.cert}"])
    with pytest.raises(ConfigError, match=r"junk\.pem is no file with certificates of a CA"):
        check_command([*command(), *tls, f"--grpc-root-cert={junk}"])
    with pytest.raises(ConfigError, match="are no certificate and its key"):
        check_command([*command(), *tls[:2], f"--grpc-server-key={junk}"])
