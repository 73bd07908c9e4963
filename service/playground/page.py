"""The playground at /: static files, sent from memory with entity tags, under a policy that admits nothing else."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, FastAPI, Header
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response

from nsm_core.hashing import identity

PAGE_URL = "/"
ASSETS_URL = "/playground"
PAGE_NAME = "index.html"
FOLDER = Path(__file__).parent / "static"
MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Trusted types: the browser refuses every way of turning text into HTML, whatever the scripts try.
CONTENT_SECURITY_POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "cache-control": "no-cache",  # ask each time: the files of one version belong together
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
}

IfNoneMatch = Annotated[str, Header()]

router = APIRouter(include_in_schema=False, default_response_class=Response)


@dataclasses.dataclass(frozen=True, slots=True)
class Asset:
    """One file as it is sent."""

    body: bytes
    media_type: str
    etag: str

    def response(self, if_none_match: str) -> Response:
        """304 without a body when the browser has this very version."""
        headers = {**HEADERS, "etag": self.etag}
        known = {tag.strip().removeprefix("W/") for tag in if_none_match.split(",")}
        if self.etag in known or "*" in known:
            return Response(status_code=304, headers=headers)
        return Response(self.body, media_type=self.media_type, headers=headers)


def add_playground(app: FastAPI) -> None:
    """The page at /, which /playground leads to, its scripts and styles under /playground/."""
    read_assets()
    app.router.routes.extend(router.routes)


@router.get(PAGE_URL)
async def page(if_none_match: IfNoneMatch = "") -> Response:
    return read_assets()[PAGE_NAME].response(if_none_match)


@router.get(ASSETS_URL)
@router.get(f"{ASSETS_URL}/")
async def to_page() -> Response:
    return RedirectResponse(PAGE_URL)


@router.get(f"{ASSETS_URL}/{{name}}")
async def asset(name: str, if_none_match: IfNoneMatch = "") -> Response:
    assets = read_assets()
    if name not in assets or name == PAGE_NAME:
        raise HTTPException(404)
    return assets[name].response(if_none_match)


@functools.cache
def read_assets() -> dict[str, Asset]:
    """By their names."""
    return {path.name: _read(path) for path in FOLDER.iterdir()}


def _read(path: Path) -> Asset:
    body = path.read_bytes()
    return Asset(body=body, media_type=MEDIA_TYPES[path.suffix], etag=f'"{identity(body)}"')
