"""Which addresses are this machine's own."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit


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
