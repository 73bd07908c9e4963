"""What /openapi.json says of errors and streams; the page at /docs, which loads nothing from other hosts."""

from __future__ import annotations

from importlib.resources import as_file, files
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel
from starlette.responses import HTMLResponse

ASSETS_URL = "/docs/assets"
# The page's own inline script and style, the assets beside it, and nothing from any other host.
CONTENT_SECURITY_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; img-src 'self' data:"
)


class ErrorDetail(BaseModel):
    """`param` names the field at fault; `code` is stable and meant for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every refusal of this server."""

    error: ErrorDetail


ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request is wrong; `message` names field, limit and given value."},
    "5XX": {"model": ErrorBody, "description": "The server cannot do it now; `Retry-After` says when to try again."},
}
GENERATION_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "One object, or with `stream: true` a stream of chunks.",
        "content": {
            "application/json": {"schema": {"type": "object"}},
            "text/event-stream": {"schema": {"type": "string"}},
        },
    },
    **ERROR_RESPONSES,
}


def add_docs_page(app: FastAPI) -> None:
    """Swagger UI, from the files that the fastapi-offline package carries."""
    with as_file(files("fastapi_offline") / "static") as directory:
        app.mount(ASSETS_URL, StaticFiles(directory=directory), name="docs_assets")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        page = get_swagger_ui_html(
            openapi_url=app.openapi_url or "",
            title=app.title,
            swagger_js_url=f"{ASSETS_URL}/swagger-ui-bundle.js",
            swagger_css_url=f"{ASSETS_URL}/swagger-ui.css",
            swagger_favicon_url=f"{ASSETS_URL}/favicon.png",
            swagger_ui_parameters={"validatorUrl": None},  # its default badge asks a public host
        )
        page.headers["content-security-policy"] = CONTENT_SECURITY_POLICY
        return page
