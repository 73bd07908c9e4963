"""Errors and streams in /openapi.json, and the page at /docs, which loads nothing from other hosts."""

from __future__ import annotations

import asyncio
import base64
import inspect
import re
from importlib.resources import as_file, files
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.routing import APIRoute
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse

from nsm_core.hashing import identity
from service.web.examples import EXAMPLES

Responses = dict[int | str, dict[str, Any]]

ASSETS_URL = "/docs/assets"
PLAYGROUND_LINK = (
    b'<nav style="padding: 12px 20px 0; font: 14px sans-serif; text-align: right"><a href="./">Playground</a></nav>'
)
# The page's own script, by its digest, the assets beside it, and nothing from any other host. Swagger UI sets styles.
CONTENT_SECURITY_POLICY = (
    "default-src 'self'; script-src 'self' 'sha256-{digest}'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none'"
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


REFUSED = (
    "The request is wrong: `message` names field, limit and given value, `param` the field. 400 a value; "
    "401, 403 the key; 404 nothing has this id; 408, 413, 415, 431 how it was sent; 409 the session is busy or has "
    "moved on; 422 the key of another request; 429 too much, with `Retry-After`."
)
FAILED = (
    "The server cannot do it now: 500 a fault of its own; 503 no room, or it is stopping, `Retry-After` says when to "
    "try again; 504 the deadline has passed; 507 the store is full."
)
REFERENCE = "#/components/schemas/{model}"


class AnswerSchema(dict[str, Any]):
    """A reference to the schema of `model`, which `DescribedApi` makes when somebody reads the description.

    FastAPI would prepare each model of each answer at the start, as if it read such answers: 0.1 s.
    """

    def __init__(self, model: type[BaseModel]) -> None:
        super().__init__({"$ref": REFERENCE.format(model=model.__name__)})
        self.model = model


def _json(model: type[BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": AnswerSchema(model)}}


ERROR_RESPONSES: Responses = {
    "4XX": {"content": _json(ErrorBody), "description": REFUSED},
    "5XX": {"content": _json(ErrorBody), "description": FAILED},
}
EVENT = {  # before OpenAPI 3.2 the schema of a stream is that of each event
    "type": "object",
    "properties": {
        "data": {"type": "string", "description": "a JSON object, or [DONE]"},
        "event": {"type": "string"},
        "id": {"type": "string", "description": "for Last-Event-ID"},
    },
    "required": ["data"],
}
STREAM_CONTENT = {"text/event-stream": {"schema": EVENT}}
STREAM_RESPONSES: Responses = {
    200: {"description": "A stream of frames.", "content": STREAM_CONTENT},
    **ERROR_RESPONSES,
}


def answers(model: type[BaseModel], *, status: int = 200) -> Responses:
    """`responses=` of a route: its good answer is of this model."""
    return {status: {"content": _json(model), "description": inspect.getdoc(model) or ""}}


def generation_responses(model: type[BaseModel]) -> Responses:
    """The same for one that streams if it is asked to."""
    description = "One object, or with `stream: true` a stream of chunks."
    # generated clients parse every answer as the first type that is listed
    content: dict[str, Any] = {**_json(model), **STREAM_CONTENT}
    return {200: {"content": content, "description": description}, **ERROR_RESPONSES}


class DescribedApi(FastAPI):
    """FastAPI whose description also has the API keys that `Authenticate` checks, and an example of each body."""

    needs_key = False  # otherwise a key is optional: stock clients always send one

    def setup(self) -> None:
        """The route of the description, which a thread makes: it takes most of a second, and streams go on."""
        if not self.openapi_url:
            return
        making = asyncio.Lock()

        async def description(request: Request) -> JSONResponse:
            async with making:
                return JSONResponse(await asyncio.to_thread(self.openapi))

        self.add_route(self.openapi_url, description, include_in_schema=False)

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            document = super().openapi()
            schemas = {**document["components"].get("schemas", {}), **self._answer_schemas()}
            document["components"]["schemas"] = dict(sorted(schemas.items()))
            document["components"]["securitySchemes"] = {"ApiKey": {"type": "http", "scheme": "bearer"}}
            for name, schema in document["components"]["schemas"].items():
                if name in EXAMPLES:
                    schema["examples"] = [EXAMPLES[name]]
            operations = [operation for path in document["paths"].values() for operation in path.values()]
            for operation in operations:
                if "health" not in operation["tags"]:
                    operation["security"] = [{"ApiKey": []}] if self.needs_key else [{}, {"ApiKey": []}]
        return super().openapi()

    def _answer_schemas(self) -> dict[str, Any]:
        """By name, of the models that routes answer with and of those inside them."""
        models = {
            schema.model
            for route in self.routes
            if isinstance(route, APIRoute)
            for answer in route.responses.values()
            for content in answer.get("content", {}).values()
            if isinstance(schema := content.get("schema"), AnswerSchema)
        }
        _, definitions = models_json_schema([(model, "serialization") for model in models], ref_template=REFERENCE)
        found: dict[str, Any] = definitions["$defs"]
        return found


def add_docs_page(app: FastAPI) -> None:
    """Swagger UI, from the files that the fastapi-offline package carries, with a link to the playground."""
    with as_file(files("fastapi_offline") / "static") as directory:
        app.mount(ASSETS_URL, StaticFiles(directory=directory), name="docs_assets")
    app.add_api_route("/docs", docs_page, include_in_schema=False, response_class=HTMLResponse)


async def docs_page(request: Request) -> HTMLResponse:
    app: FastAPI = request.app
    page = get_swagger_ui_html(
        openapi_url=app.openapi_url or "",
        title=app.title,
        swagger_js_url=f"{ASSETS_URL}/swagger-ui-bundle.js",
        swagger_css_url=f"{ASSETS_URL}/swagger-ui.css",
        swagger_favicon_url=f"{ASSETS_URL}/favicon.png",
        swagger_ui_parameters={"validatorUrl": None},  # its default badge asks a public host
    )
    if request.app.state.services.settings.playground:
        page = HTMLResponse(bytes(page.body).replace(b"<body>", b"<body>" + PLAYGROUND_LINK, 1))
    page.headers["content-security-policy"] = CONTENT_SECURITY_POLICY.format(digest=script_digest(bytes(page.body)))
    return page


def script_digest(page: bytes) -> str:
    """Of the one script in a page, as a policy names it."""
    (script,) = re.findall(rb"<script>(.*?)</script>", page, re.DOTALL)
    return base64.b64encode(bytes.fromhex(identity(script))).decode()
