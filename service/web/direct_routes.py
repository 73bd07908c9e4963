"""Pure ASGI middleware, the innermost: finds the route of most requests at once, and calls its endpoint itself.

The router asks its routes one after the other, and the framework wraps each call into handlers of errors and stacks of
what is cleaned up. Errors of an endpoint are answered here, by the framework's handler: the layers around add their
headers to each answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.convertors import StringConvertor
from starlette.requests import Request
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from service.web.errors import handle
from service.web.json_body import JsonRoute

Key = tuple[str, int, str, str | None]  # method, number of segments, the first two, the last if it is fixed


class RouteDirectly:
    """Leaves to the router: routes of other kinds, and what no route has, a path or a method."""

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute]) -> None:
        self.app = app
        self._routes = index_of([route for route in routes if isinstance(route, JsonRoute)])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._find(scope) if scope["type"] == "http" and not scope.get("root_path") else None
        if route is None or route.direct is None:
            await self.app(scope, receive, send)
            return
        request = Request(scope, receive, send)
        try:
            response = await route.direct(request)
        except Exception as error:
            response = await handle(request, error)
        await response(scope, receive, send)

    def _find(self, scope: Scope) -> JsonRoute | None:
        """The first route that matches, which is then in the scope."""
        segments = scope["path"].split("/")
        method, number, start = scope["method"], len(segments), "/".join(segments[:3])
        found = self._routes.get((method, number, start, segments[-1]))
        for route in self._routes.get((method, number, start, None), ()) if found is None else found:
            match, child_scope = route.matches(scope)
            if match is Match.FULL:
                scope.update(child_scope)
                return route
        return None


def index_of(routes: Sequence[JsonRoute]) -> dict[Key, list[JsonRoute]]:
    """For each key the routes that may match, in their order: those with this last segment, and those with any."""
    by_start: dict[tuple[str, int, str], list[tuple[str | None, JsonRoute]]] = {}
    for route in routes:
        for method, number, start, last in _keys_of(route):
            by_start.setdefault((method, number, start), []).append((last, route))
    return {
        (*start, last): [route for other, route in found if other in (last, None)]
        for start, found in by_start.items()
        for last, _ in found
    }


def _keys_of(route: JsonRoute) -> list[Key]:
    """None of a route whose parameter takes several segments."""
    if not all(type(convertor) is StringConvertor for convertor in route.param_convertors.values()):
        return []
    segments = route.path.split("/")
    last = None if "{" in segments[-1] else segments[-1]
    return [(method, len(segments), "/".join(segments[:3]), last) for method in sorted(route.methods or ())]
