"""Checks before a Triton server loads a model: everything that would keep it from starting."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from nsm_core.errors import ConfigError, reason_of
from nsm_core.triton.pem_files import check_ca, check_pair

# What listens: the server's own default port, and the option that tells where (metrics are where HTTP is, unless told)
LISTENERS = {
    "grpc": ("8001", ("grpc-address",)),
    "http": ("8000", ("http-address",)),
    "metrics": ("8002", ("metrics-address", "http-address")),
}
EVERYWHERE = "0.0.0.0"  # noqa: S104  # looked for in addresses; nothing is bound to it here


def check_command(command: Sequence[str]) -> None:
    """`command`: of a Triton server, its options as `--name=value`. Raises ConfigError: TLS files are of no use, or a
    port is taken.
    """
    options = dict(_split(argument) for argument in command if argument.startswith("--"))
    _check_tls(options)
    _check_ports(options)


def _split(argument: str) -> tuple[str, str]:
    name, _, value = argument[2:].partition("=")
    return name, value


def _check_tls(options: Mapping[str, str]) -> None:
    if options.get("grpc-use-ssl") == "1":
        check_pair(Path(options["grpc-server-cert"]), Path(options["grpc-server-key"]))
        if "grpc-root-cert" in options:
            check_ca(Path(options["grpc-root-cert"]))


def _check_ports(options: Mapping[str, str]) -> None:
    """The ports are free when it returns; nothing keeps others from them."""
    taken: dict[str, str] = {}
    for listener, (default_port, names) in LISTENERS.items():
        option, port = f"--{listener}-port", options.get(f"{listener}-port", default_port)
        if port in taken:
            raise ConfigError(f"{taken[port]} and {option} are both {port}: each needs a port of its own")
        taken[port] = option
        host = next((options[name] for name in names if name in options), EVERYWHERE)
        _check_port(option, host, int(port))


def _check_port(option: str, host: str, port: int) -> None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that ended do not hold a port
            sock.bind(address)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port} ({option}): {reason_of(error)}") from error
