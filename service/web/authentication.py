"""Pure ASGI middleware: checks API keys and the request rate of their tenants.

It runs before the body is read and before the route is looked up, so a new route cannot be left open by mistake.
"""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nsm_core.errors import Forbidden, RateLimited
from service.playground import page
from service.tenants.rate_limit import Allowance
from service.tenants.tenants import Caller, Tenants
from service.web.errors import answer
from service.web.openapi import ASSETS_URL

OPEN_PATHS = frozenset(
    {"/health", "/health/live", "/health/ready", "/docs", "/openapi.json", page.PAGE_URL, page.ASSETS_URL}
)
OPEN_FOLDERS = (f"{ASSETS_URL}/", f"{page.ASSETS_URL}/")
METRICS_PATH = "/metrics"
KEY_PROTOCOL = "openai-insecure-api-key."  # OpenAI's name


class Authenticate:
    """Puts `caller` into the request's state for `deps.get_tenant`."""

    def __init__(self, app: ASGIApp, tenants: Tenants) -> None:
        self.app = app
        self.tenants = tenants

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or is_open(scope["path"]):
            await self.app(scope, receive, send)
            return
        caller = self.tenants.identify(key_of(Headers(scope=scope)) if self.tenants.has_keys else None)
        scope.setdefault("state", {})["caller"] = caller
        if scope["path"] == METRICS_PATH:
            _require_metrics(caller)
            await self.app(scope, receive, send)
            return
        allowance = self.tenants.take(caller.tenant)
        if allowance is None:
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"].endswith("http.response.start"):
                MutableHeaders(raw=message["headers"]).update(headers_of(allowance))
            await send(message)

        if allowance.retry_after_s is None:
            await self.app(scope, receive, send_with_headers)
        else:
            error = _too_fast(allowance, allowance.retry_after_s)
            await answer(error).response()(scope, receive, send_with_headers)


def is_open(path: str) -> bool:
    """Whether no key is needed: health for load balancers, the documentation, and the playground, which asks for a key
    itself.
    """
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDERS)


def key_of(headers: Headers) -> str | None:
    """The key as it was sent; None when there is none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key") or _key_in_protocols(headers) or None


def _key_in_protocols(headers: Headers) -> str:
    """Of a WebSocket that a browser opens: it can send no other header."""
    offered = (item.strip() for item in headers.get("sec-websocket-protocol", "").split(","))
    return next((item.removeprefix(KEY_PROTOCOL) for item in offered if item.startswith(KEY_PROTOCOL)), "")


def headers_of(allowance: Allowance) -> dict[str, str]:
    """OpenAI's names; the reset is in seconds, as in "1.25s"."""
    return {
        "x-ratelimit-limit-requests": str(allowance.limit),
        "x-ratelimit-remaining-requests": str(allowance.remaining),
        "x-ratelimit-reset-requests": f"{allowance.reset_s:.3f}s",
    }


def _require_metrics(caller: Caller) -> None:
    if not caller.may_read_metrics:
        raise Forbidden("this API key may not read /metrics, which covers all tenants; make one with --metrics")


def _too_fast(allowance: Allowance, retry_after_s: float) -> RateLimited:
    return RateLimited(
        f"too many requests: requests_per_s of this API key's tenant is {allowance.per_s:g}, its burst "
        f"{allowance.limit}; try again in {retry_after_s:.2f} s",
        retry_after_s=retry_after_s,
    )
