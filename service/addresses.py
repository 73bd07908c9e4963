"""Names and addresses of hosts, and which are this machine's own."""

from __future__ import annotations

import functools
import ipaddress
import re
from urllib.parse import urlsplit

NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")  # underscores: services of Compose have them


def is_host_name(text: str) -> bool:
    """Whether `text`, in lower case, may name a host in a request, without a port."""
    return NAME.fullmatch(text) is not None


@functools.lru_cache(maxsize=256)
def is_address(host: str) -> bool:
    """Whether `host` is an IPv4 or IPv6 address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach a numeric address. Raises ValueError for a name."""
    found = ipaddress.ip_address(address.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback


def is_loopback_url(url: str) -> bool:
    """Whether a URL, or a `host:port`, names this machine: such a request must not go through a proxy."""
    try:
        host = urlsplit(url if "://" in url else f"//{url}").hostname or ""
    except ValueError:
        return False
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return is_loopback(host)
    except ValueError:
        return False
