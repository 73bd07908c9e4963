"""A real Triton server on this project's model repository, for development and tests; production uses the vendor's."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from nsm_core.errors import ConfigError
from nsm_core.triton.config import PARAMETERS
from nsm_core.triton.pem_files import check_ca, check_pair
from nsm_core.triton.shm_ownership import own_directory
from nsm_core.triton.supervisor import DEFAULT_PREFIX, Supervisor

LOOPBACK = "127.0.0.1"
REPOSITORY = Path(__file__).resolve().parents[3] / "model_repository"


def default_home() -> Path:
    """Where `scripts/triton-server` installs: inside this interpreter's environment."""
    return Path(sys.prefix) / "triton"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerTls:
    """PEM files: the server's certificate and its key. `client_ca`: who signs those of clients; None asks for none."""

    cert: Path
    key: Path
    client_ca: Path | None = None

    @classmethod
    def of(cls, *, cert: Path | None, key: Path | None, client_ca: Path | None) -> ServerTls | None:
        """None where nothing is given. Raises ConfigError where something lacks or is of no use."""
        if cert is None and key is None and client_ca is None:
            return None
        if cert is None or key is None:
            raise ConfigError("TLS needs a certificate and its key (--tls-cert, --tls-key)")
        check_pair(cert, key)
        if client_ca is not None:
            check_ca(client_ca)
        return cls(cert=cert, key=key, client_ca=client_ca)

    def options(self) -> list[str]:
        options = ["--grpc-use-ssl=1", f"--grpc-server-cert={self.cert}", f"--grpc-server-key={self.key}"]
        if self.client_ca is not None:
            options += ["--grpc-use-ssl-mutual=1", f"--grpc-root-cert={self.client_ca}"]
        return options


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TritonServer:
    """One server. `home`: its environment; `repository`: a model repository, see `write_repository`."""

    home: Path
    repository: Path = REPOSITORY
    host: str = LOOPBACK
    http_port: int
    grpc_port: int
    metrics_port: int
    drain_s: float = 30.0
    tls: ServerTls | None = None

    @property
    def http_host(self) -> str:
        """Triton has no HTTPS, and an open door beside a locked one locks nothing."""
        return self.host if self.tls is None else LOOPBACK

    @property
    def region_prefix(self) -> str:
        """Of its shared memory: servers on one machine must not share it."""
        return f"{DEFAULT_PREFIX}{self.grpc_port}_"

    def command(self) -> list[str]:
        """Raises ConfigError where no server is installed."""
        server = self._packages() / "pytriton" / "tritonserver"
        program = server / "bin" / "tritonserver"
        if not program.exists():
            raise ConfigError(f"there is no Triton server in {self.home}: scripts/triton-server installs one")
        return [
            str(program),
            f"--model-repository={self.repository}",
            f"--backend-directory={server / 'backends'}",
            "--disable-auto-complete-config",
            f"--http-address={self.http_host}",
            f"--http-port={self.http_port}",
            f"--grpc-address={self.host}",
            f"--grpc-port={self.grpc_port}",
            f"--metrics-address={self.host}",
            f"--metrics-port={self.metrics_port}",
            f"--exit-timeout-secs={round(self.drain_s)}",
            *([] if self.tls is None else self.tls.options()),
        ]

    def environment(self) -> dict[str, str]:
        """The backend's process finds its Python by PATH, and the interpreter's library by LD_LIBRARY_PATH."""
        libraries = [str(sysconfig.get_config_var("LIBDIR") or ""), os.environ.get("LD_LIBRARY_PATH", "")]
        return {
            **os.environ,
            "PATH": f"{self.home / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
            "LD_LIBRARY_PATH": os.pathsep.join(path for path in libraries if path),
        }

    def _packages(self) -> Path:
        return Path(sysconfig.get_path("purelib", vars={"base": str(self.home), "platbase": str(self.home)}))


@dataclasses.dataclass(frozen=True, slots=True)
class InstanceGroup:
    """`count` processes that run the model: on each of `gpus`, or on each GPU, or on the CPU if there is none."""

    count: int = 1
    gpus: tuple[int, ...] = ()

    def text(self) -> str:
        """As in `config.pbtxt`."""
        kind = f" kind: KIND_GPU gpus: [ {', '.join(map(str, self.gpus))} ]" if self.gpus else ""
        return f"instance_group [ {{ count: {self.count}{kind} }} ]"


def write_repository(
    target: Path,
    parameters: Mapping[str, str],
    *,
    instances: InstanceGroup = InstanceGroup(),  # frozen
    source: Path = REPOSITORY,
) -> None:
    """Copies a model repository with other values for some parameters of the model `nsm`. Raises ConfigError."""
    if not (source / "nsm" / "config.pbtxt").exists():
        raise ConfigError(f"{source} holds no model nsm: run this from a checkout")
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    config = target / "nsm" / "config.pbtxt"
    text = config.read_text("utf-8")
    for name, value in parameters.items():
        text = _with_parameter(text, name, value)
    config.write_text(text.replace(InstanceGroup().text(), instances.text()), "utf-8")


def _with_parameter(text: str, name: str, value: str) -> str:
    if name not in PARAMETERS:
        raise ConfigError(f"unknown parameter {name}; known: {', '.join(PARAMETERS)}")
    try:
        PARAMETERS[name](value)
    except ConfigError as error:
        raise ConfigError(f"{name} {error}") from error
    quoted = value.replace("\\", "\\\\").replace('"', '\\"')
    parameter = re.compile(rf'(key: "{name}" value {{ string_value: )"[^"]*"')
    return parameter.sub(lambda found: f'{found[1]}"{quoted}"', text)


def run(
    server: TritonServer,
    parameters: Mapping[str, str],
    *,
    instances: InstanceGroup = InstanceGroup(),  # frozen
) -> int:
    """Runs the server, with a repository of its own, until it ends; SIGTERM and Ctrl-C end it in good order.

    Returns its exit status. Raises ConfigError.
    """
    with own_directory("nsm-triton-") as directory:
        server = dataclasses.replace(server, repository=directory)
        command = server.command()
        write_repository(server.repository, parameters, instances=instances)
        return Supervisor(command, prefix=server.region_prefix, environment=server.environment()).run()
