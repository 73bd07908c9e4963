"""NSM_STORE for Redis: servers, user, TLS. Secrets are never shown."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from nsm_core.errors import ConfigError

Topology = Literal["single", "sentinel", "cluster"]

DEFAULT_PORTS: Mapping[Topology, int] = {"single": 6379, "sentinel": 26379, "cluster": 6379}
SCHEMES: Mapping[str, tuple[Topology, bool]] = {  # topology, TLS
    "redis": ("single", False),
    "rediss": ("single", True),
    "redis+sentinel": ("sentinel", False),
    "rediss+sentinel": ("sentinel", True),
    "redis+cluster": ("cluster", False),
    "rediss+cluster": ("cluster", True),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RedisAddress:
    """A parsed NSM_STORE; `str()` of it is fit for logs.

    `service`: the name of the master that the Sentinels watch. `pool_timeout_s`: how long a call waits for one of the
    `max_connections`; `socket_timeout_s`: how long it waits for the server. `max_value_bytes`: of any one value; the
    default is Redis' own bound (`proto-max-bulk-len`). `tls_*`: paths of PEM files.
    """

    topology: Topology
    is_tls: bool
    nodes: tuple[tuple[str, int], ...]
    service: str | None = None
    database: int = 0
    username: str | None = dataclasses.field(default=None, repr=False)
    password: str | None = dataclasses.field(default=None, repr=False)
    sentinel_username: str | None = dataclasses.field(default=None, repr=False)
    sentinel_password: str | None = dataclasses.field(default=None, repr=False)
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_check_hostname: bool = True
    prefix: str = "nsm"
    max_connections: int = 32
    pool_timeout_s: float = 2.0
    connect_timeout_s: float = 2.0
    socket_timeout_s: float = 5.0
    max_value_bytes: int = 512 * 1024 * 1024

    def __str__(self) -> str:
        scheme = next(name for name, kind in SCHEMES.items() if kind == (self.topology, self.is_tls))
        hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.nodes)
        path = "".join(f"/{part}" for part in (self.service, self.database or None) if part is not None)
        return f"{scheme}://{hosts}{path}"


def parse_redis_url(url: str) -> RedisAddress:
    """Raises ConfigError, which names the fault without repeating the URL."""
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        raise _bad(f"the scheme must be one of {', '.join(SCHEMES)}")
    topology, is_tls = SCHEMES[parts.scheme]
    if parts.fragment:
        raise _bad("'#' must be written as %23")
    credentials, _, hosts = parts.netloc.rpartition("@")
    nodes = tuple(_node(host, DEFAULT_PORTS[topology]) for host in hosts.split(","))
    if topology == "single" and len(nodes) > 1:
        raise _bad("several hosts need redis+sentinel:// or redis+cluster://")
    options = _options(parts, is_tls=is_tls, topology=topology)
    username, password = _credentials(credentials)
    service, database = _path(parts.path, topology)
    return RedisAddress(
        topology=topology,
        is_tls=is_tls,
        nodes=nodes,
        service=service,
        database=database,
        username=username,
        password=password,
        **options,
    )


def _bad(message: str) -> ConfigError:
    return ConfigError(f"NSM_STORE (--store): {message}")


def _node(text: str, default_port: int) -> tuple[str, int]:
    try:
        parsed = urlsplit(f"//{text}")
        host, port = parsed.hostname, parsed.port
    except ValueError:
        raise _bad("a host must look like host, host:port or [IPv6]:port") from None
    if not host:
        raise _bad("a host is missing")
    return host, default_port if port is None else port


def _credentials(text: str) -> tuple[str | None, str | None]:
    if not text:
        return None, None
    username, separator, password = text.partition(":")
    if not separator or not password:
        raise _bad("the user needs a password: redis://user:password@host, or redis://:password@host")
    return unquote(username) or None, unquote(password)


def _path(path: str, topology: Topology) -> tuple[str | None, int]:
    names = [unquote(name) for name in path.split("/") if name]
    service = None
    if topology == "sentinel":
        if not names:
            raise _bad("redis+sentinel:// ends with the name of the service: redis+sentinel://host:26379/service")
        service = names.pop(0)
    if len(names) > 1 or (names and not names[0].isdecimal()):
        raise _bad("after the host comes at most the number of a database")
    database = int(names[0]) if names else 0
    if topology == "cluster" and database:
        raise _bad("a cluster has no databases but 0")
    return service, database


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def _positive_float(text: str) -> float:
    value = float(text)
    if not 0.0 < value < 3600.0:
        raise ValueError
    return value


def _yes_no(text: str) -> bool:
    return {"yes": True, "no": False}[text]


def _prefix(text: str) -> str:
    if not text or not all(letter.isascii() and (letter.isalnum() or letter in "_.:-") for letter in text):
        raise ValueError
    return text


_TLS_OPTIONS: Mapping[str, tuple[Callable[[str], Any], str]] = {
    "tls_ca": (str, "a path"),
    "tls_cert": (str, "a path"),
    "tls_key": (str, "a path"),
    "tls_check_hostname": (_yes_no, "yes or no"),
}
_SENTINEL_OPTIONS: Mapping[str, tuple[Callable[[str], Any], str]] = {
    "sentinel_username": (str, "a name"),
    "sentinel_password": (str, "a password"),
}
_OPTIONS: Mapping[str, tuple[Callable[[str], Any], str]] = {
    "prefix": (_prefix, "letters, digits and _ . : -"),
    "max_connections": (_positive_int, "a number from 1 on"),
    "pool_timeout_s": (_positive_float, "seconds, more than 0"),
    "connect_timeout_s": (_positive_float, "seconds, more than 0"),
    "socket_timeout_s": (_positive_float, "seconds, more than 0"),
    "max_value_bytes": (_positive_int, "a number from 1 on"),
}


def _options(parts: SplitResult, *, is_tls: bool, topology: Topology) -> dict[str, Any]:
    known = dict(_OPTIONS)
    if is_tls:
        known.update(_TLS_OPTIONS)
    if topology == "sentinel":
        known.update(_SENTINEL_OPTIONS)
    options: dict[str, Any] = {}
    for name, text in parse_qsl(parts.query, keep_blank_values=True):
        if name not in known:
            raise _bad(f"unknown option {name[:40]!r}; {parts.scheme}:// has {', '.join(known)}")
        parse, meaning = known[name]
        try:
            options[name] = parse(text)
        except (ValueError, KeyError):
            raise _bad(f"option {name} must be {meaning}") from None
    return options
