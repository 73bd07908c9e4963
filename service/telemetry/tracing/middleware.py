"""A span for each HTTP request, which continues its client's trace.

Not FastAPI's own tracing, nor OpenTelemetry's ASGI instrumentation: both put the query string or the Host or User-Agent
header into the span, text that a client wrote, and neither names the route of a request that a middleware refused.
"""

from __future__ import annotations

from opentelemetry.trace import SpanKind, StatusCode, Tracer, format_trace_id
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.telemetry.request_context import CurrentRequest, current_request

UNTRACED = ("/health", "/metrics")  # polled by machines


class TraceRequests:
    """Pure ASGI, inside RequestContext. The span ends with the answer's last byte, or when the client leaves."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self.app = app
        self._tracer = tracer
        self._propagator = TraceContextTextMapPropagator()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(UNTRACED):
            await self.app(scope, receive, send)
            return
        status = 0

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        parent = self._propagator.extract(dict(Headers(scope=scope)))
        method = scope["method"]
        with self._tracer.start_as_current_span(method, parent, SpanKind.SERVER) as span:
            request = current_request()
            if request is not None:
                request.trace_id = format_trace_id(span.get_span_context().trace_id)
            try:
                await self.app(scope, receive, send_and_note)
            finally:
                route = getattr(scope.get("route"), "path", None)
                span.update_name(method if route is None else f"{method} {route}")
                span.set_attributes(_attributes(scope, route, status, request))
                if status >= 500:
                    span.set_status(StatusCode.ERROR)


def _attributes(scope: Scope, route: str | None, status: int, request: CurrentRequest | None) -> dict[str, str | int]:
    """By OpenTelemetry's conventions for HTTP; attributes without a convention are under `nsm.`."""
    attributes: dict[str, str | int] = {"http.request.method": scope["method"], "url.path": scope["path"]}
    if route is not None:
        attributes["http.route"] = route
    if status:  # 0: the client left before
        attributes["http.response.status_code"] = status
    session_id = scope.get("path_params", {}).get("session_id")
    if session_id is not None:
        attributes["gen_ai.conversation.id"] = session_id
    if request is not None:
        attributes["nsm.request_id"] = request.request_id
        if request.error is not None:
            attributes["error.type"] = request.error
    return attributes
