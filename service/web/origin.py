"""Pure ASGI middleware: which Host a request may name, and which web pages may send requests (CORS, CSRF).

Two attacks need no key when the server has none. DNS rebinding: a page of `evil.example` has its own name resolved to
127.0.0.1, so that the browser takes this server for the page's origin; the Host header still says `evil.example`.
Cross-site requests: a page of another origin sends a request whose answer it cannot read, but whose effect stays.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from nsm_core.errors import Forbidden, InvalidRequest, MisdirectedRequest
from service.addresses import is_address, is_host_name
from service.web.headers import has_header

ANY = "*"
LOCALHOST = "localhost"
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
OWN_PAGES = frozenset({"same-origin", "none"})  # values of Sec-Fetch-Site; "none": typed into the address bar


class RequireHost:
    """Refuses a Host that is neither an IP address nor one of `names`.

    An IP address cannot be re-bound, so any is accepted: behind address translation the server does not know its own.
    `names`: None accepts every name, for servers that ask for a key.
    """

    def __init__(self, app: ASGIApp, names: Collection[str] | None) -> None:
        self.app = app
        self.names = None if names is None or ANY in names else {LOCALHOST, *(name.lower() for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
            self._check(given, scope["http_version"])
        await self.app(scope, receive, send)

    def _check(self, given: list[str], http_version: str) -> None:
        """Raises InvalidRequest or MisdirectedRequest."""
        if not given and http_version == "1.0":  # HTTP/1.0 has no such header; browsers do not speak it
            return
        if len(given) != 1:
            raise InvalidRequest(f"a request must have one Host header, got {len(given)}", code="invalid_host")
        host = host_name(given[0])
        if host is None:
            raise InvalidRequest("the Host header must be a host name or an address", code="invalid_host")
        if self.names is not None and not is_address(host) and not self._is_known(host):
            raise MisdirectedRequest(
                f"this server does not answer for the host {host[:255]}; name it in NSM_ALLOWED_HOSTS "
                "(a list with commas, * for any name), or use an address or localhost"
            )

    def _is_known(self, host: str) -> bool:
        return host in (self.names or ()) or host.endswith(f".{LOCALHOST}")


class RequireOwnOrigin:
    """Refuses unsafe methods and WebSockets from web pages of other origins, but for those of `origins`. Programs send
    no Origin.
    """

    def __init__(self, app: ASGIApp, origins: Collection[str]) -> None:
        self.app = app
        self.origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if is_checked(scope) and (has_header(scope, b"origin") or has_header(scope, b"sec-fetch-site")):
            self._check(Headers(scope=scope))  # programs send neither
        await self.app(scope, receive, send)

    def _check(self, headers: Headers) -> None:
        """Raises Forbidden."""
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if site in OWN_PAGES:
            return  # the browser says so
        if origin is not None and (
            ANY in self.origins or origin in self.origins or is_same_host(origin, headers.get("host", ""))
        ):
            return
        raise Forbidden(
            f"a web page of {(origin or 'another site')[:255]} may not send requests here; name its origin in "
            "NSM_CORS_ORIGINS to let it",
            code="cross_origin",
        )


def is_checked(scope: Scope) -> bool:
    """Whether its origin matters."""
    return scope["type"] == "websocket" or (scope["type"] == "http" and scope["method"] not in SAFE_METHODS)


@functools.lru_cache(maxsize=256)  # clients send one of a few
def host_name(value: str) -> str | None:
    """The name or address of a Host header in lower case, without its port; None if it is neither."""
    try:
        parts = urlsplit(f"//{value}")
        _ = parts.port  # raises ValueError for a bad one
    except ValueError:
        return None
    host = (parts.hostname or "").removesuffix(".")
    is_bare = parts.netloc == value and "@" not in value
    return host if is_bare and (is_host_name(host) or is_address(host)) else None


def is_same_host(origin: str, host: str) -> bool:
    """Whether a page of `origin` came from the server that the request names. Its scheme may differ: a proxy in front
    may end TLS.
    """
    parts = urlsplit(origin)
    return parts.scheme in ("http", "https") and _authority(parts.netloc, parts.scheme) == _authority(
        host, parts.scheme
    )


def _authority(netloc: str, scheme: str) -> str:
    """Browsers leave out a scheme's own port."""
    port = ":443" if scheme == "https" else ":80"
    return netloc.lower().removesuffix(port)
