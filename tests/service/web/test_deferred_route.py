"""Routes are found before they are prepared, and prepared when they are asked for or described."""

from __future__ import annotations

import asyncio

import httpx
from fastapi import APIRouter, FastAPI
from starlette.responses import Response

from service.web.deferred_route import DeferredRoute


def make_app() -> tuple[FastAPI, DeferredRoute]:
    router = APIRouter(route_class=DeferredRoute)

    @router.post("/items/{number}", summary="Take one", status_code=201)
    async def take(number: int, wanted: bool = False) -> Response:
        """Takes it."""
        return Response(f"{number} {wanted}", 201)

    app = FastAPI()
    app.router.routes.extend(router.routes)
    (route,) = router.routes
    assert isinstance(route, DeferredRoute)
    return app, route


def is_prepared(route: DeferredRoute) -> bool:
    return "dependant" in vars(route)


async def test_a_request_prepares_its_route_and_another_method_does_not() -> None:
    app, route = make_app()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        assert (await client.get("/items/3")).status_code == 405
        assert (await client.post("/others/3")).status_code == 404
        assert not is_prepared(route)
        answers = await asyncio.gather(*(client.post("/items/3?wanted=true") for _ in range(2)))
        assert [(answer.status_code, answer.text) for answer in answers] == [(201, "3 True")] * 2
        assert is_prepared(route)
        assert (await client.post("/items/x")).status_code == 422


def test_a_description_prepares_it() -> None:
    app, route = make_app()
    described = app.openapi()["paths"]["/items/{number}"]["post"]
    assert described["summary"] == "Take one"
    assert described["description"] == "Takes it."
    assert [parameter["name"] for parameter in described["parameters"]] == ["number", "wanted"]
    assert is_prepared(route)


def test_what_no_route_has_is_an_error() -> None:
    _, route = make_app()
    assert not hasattr(route, "unknown")
    assert route.status_code == 201
