"""Pure ASGI middleware: RequestContext, AnswerHead, CatchErrors, TrackRequests, Body. `create_app` shows the order."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nsm_core.errors import BodyTooLarge, BodyTooSlow, Overloaded, ServerStopping
from nsm_core.random_ids import random_id
from service.lifecycle.lifecycle import Lifecycle
from service.served_models import holding_models
from service.telemetry.metrics.metrics import Metrics
from service.telemetry.request_context import ARRIVAL, WHOLE_BODY, CurrentRequest, answering
from service.web.errors import ErrorAnswer, answer, report
from service.web.headers import header
from service.web.live_body import is_live

access_logger = logging.getLogger("nsm.access")

MAX_LARGE_BODIES = 32  # of the largest size, that are held at once
FILES_PATH = "/v1/files"
FREE_BODY_BYTES = 64 * 1024
REQUEST_ID = re.compile(r"[A-Za-z0-9._~:+/=-]{1,128}")
PLAIN = re.compile(r"[!#-<>-~]+")  # a value that a line of the log has without quotes
# Defaults of every answer: not cached, not shown in a frame of another host, and no scripts if opened in a browser.
HEADERS = (
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
)
PING_S = 15.0  # silence after which a stream sends a comment, so that proxies keep it open
CLIENT_LEFT = 499  # nginx's number for it: only in logs and metrics


class RequestContext:
    """Gives each request an id and an arrival time, and reports it when it has ended.

    `send_part` in the scope's state bypasses the inner layers: none of them reads the middle parts of a body.
    `routes`: the application's, to name requests that are refused before they are routed.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: Sequence[BaseRoute]) -> None:
        self.app = app
        self.metrics = metrics
        self.routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._open_websocket(scope, receive, send)
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        arrival: float = state.setdefault(ARRIVAL, time.monotonic())
        request_id = _id_of(scope)
        state.update(request_id=request_id, send_part=send, stream_ping_s=PING_S)
        status = CLIENT_LEFT

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                add_headers(message["headers"], request_id)
            await send(message)

        with answering(request_id) as request:
            try:
                await self.app(scope, receive, send_with_headers)
            finally:
                del state["send_part"]  # it leads to the scope: without it, all that the request held goes at once
                self._report(scope, request, status, time.monotonic() - arrival)

    async def _open_websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A refused handshake is an answer as any other."""
        request_id = _id_of(scope)
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "websocket.http.response.start":
                add_headers(message["headers"], request_id)
                _log({"request_id": request_id, "path": scope["path"], "status": message["status"]})
            await send(message)

        with answering(request_id):
            await self.app(scope, receive, send_with_headers)

    def _report(self, scope: Scope, request: CurrentRequest, status: int, duration_s: float) -> None:
        route = path_template(scope, self.routes)
        self.metrics.requests.http_answered(method=scope["method"], route=route, status=status, error=request.error)
        if not access_logger.isEnabledFor(logging.INFO):
            return
        caller = scope["state"].get("caller")
        who = {} if caller is None or caller.key_id is None else {"tenant": caller.tenant, "key": caller.key_id}
        fields = {
            "request_id": scope["state"]["request_id"],
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "duration_ms": round(duration_s * 1000, 1),
            **who,
        }
        _log(fields)


class AnswerHead:
    """HEAD is answered wherever GET is, with the same headers; the server leaves the body out (RFC 9110, 9.3.2)."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_head = scope["type"] == "http" and scope["method"] == "HEAD"
        await self.app({**scope, "method": "GET"} if is_head else scope, receive, send)


class CatchErrors:
    """An exception becomes the standard error body, unless the answer has begun, or the WebSocket was accepted."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False

        async def send_and_note(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self.app(scope, receive, send_and_note)
        except Exception as error:
            if scope["type"] not in ("http", "websocket"):
                raise
            request_id = scope["state"]["request_id"]
            report(error, request_id=request_id)
            if not has_started:  # otherwise the server closes the connection: the client sees a cut answer
                await answer(error, request_id=request_id).response()(scope, receive, send)


class TrackRequests:
    """Counts the running requests, and keeps their models loaded. While the server stops, only GET and HEAD are
    answered.
    """

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle) -> None:
        self.app = app
        self.lifecycle = lifecycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if self.lifecycle.is_draining and scope["method"] not in ("GET", "HEAD"):
            response = answer(ServerStopping()).response()
            response.headers["connection"] = "close"  # so that the next try reaches another replica
            await response(scope, receive, send)
            return
        with self.lifecycle.track(), holding_models():
            await self.app(scope, receive, send)


class BodyMemory:
    """Memory for the bodies of all requests under way, in bytes.

    The first FREE_BODY_BYTES of each body do not count, so that slow uploads of large bodies cannot keep small requests
    out.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_held = 0

    def share(self) -> BodyShare:
        """What one body holds, inside `with`."""
        return BodyShare(self)


class BodyShare:
    """One body's part of the memory, until its request ends."""

    def __init__(self, memory: BodyMemory) -> None:
        self.num_held = 0
        self._memory = memory

    def __enter__(self) -> BodyShare:
        return self

    def __exit__(self, *error: object) -> None:
        self._memory.num_held -= self.num_held

    def grow(self, num_bytes: int) -> None:
        """The body has `num_bytes` by now. Raises Overloaded if all bodies together have too many."""
        added = max(0, num_bytes - FREE_BODY_BYTES) - self.num_held
        if added > 0 and self._memory.num_held + added > self._memory.max_bytes:
            raise Overloaded(f"the bodies of the requests under way have {self._memory.num_held} bytes, the maximum")
        self.num_held += added
        self._memory.num_held += added


class Body:
    """The only reader of `receive`, but for live bodies: reads the body within its limits, then watches for the client
    to leave.

    `max_file_bytes`: of an upload to FILES_PATH, if not as others. `piece_s`: maximum seconds between two pieces of the
    body; `whole_s`: for the whole body. All bodies under way together take at most MAX_LARGE_BODIES times the larger
    limit.

    When the client leaves before the answer is complete, the handler's task is cancelled, streamed or not.
    """

    def __init__(
        self, app: ASGIApp, max_bytes: int, *, piece_s: float, whole_s: float, max_file_bytes: int | None = None
    ) -> None:
        self.app = app
        self.max_bytes = max_bytes
        self.max_file_bytes = max_bytes if max_file_bytes is None else max_file_bytes
        self.memory = BodyMemory(MAX_LARGE_BODIES * max(max_bytes, self.max_file_bytes))
        self.piece_s = piece_s
        self.whole_s = whole_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_live(scope):
            await self.app(scope, receive, send)
            return
        with self.memory.share() as share:
            max_bytes = self.max_file_bytes if scope.get("path") == FILES_PATH else self.max_bytes
            body = await self._read(scope, receive, share, max_bytes)
            if body is not None:
                await WatchedRequest(body, receive, send).run(self.app, scope)

    async def _read(self, scope: Scope, receive: Receive, share: BodyShare, max_bytes: int) -> bytes | None:
        """The whole body, or None when the client left first.

        Raises BodyTooLarge before the excess is read, BodyTooSlow, or Overloaded.
        """
        length, state = header(scope, b"content-length"), scope.get("state", {})
        if length.isdecimal() and (len(length) > 18 or int(length) > max_bytes):
            raise BodyTooLarge(f"the body must have at most {max_bytes} bytes, got {length[:24]}")
        chunks: list[bytes] = []
        num_bytes, deadline = 0, time.monotonic() + self.whole_s
        while True:
            message = await (receive() if WHOLE_BODY in state else self._next_piece(receive, deadline, num_bytes))
            if message["type"] == "http.disconnect":
                return None
            chunks.append(message.get("body", b""))
            num_bytes += len(chunks[-1])
            if num_bytes > max_bytes:
                raise BodyTooLarge(f"the body must have at most {max_bytes} bytes, got at least {num_bytes}")
            share.grow(num_bytes)
            if not message.get("more_body", False):
                return b"".join(chunks)

    async def _next_piece(self, receive: Receive, deadline: float, num_bytes: int) -> Message:
        try:
            async with asyncio.timeout(min(self.piece_s, deadline - time.monotonic())):
                return await receive()
        except TimeoutError:
            raise BodyTooSlow(
                f"the body stopped after {num_bytes} bytes: {self.piece_s:g} s may pass between two pieces of it, "
                f"{self.whole_s:g} s in all"
            ) from None


class WatchedRequest:
    """One request with its body, and the watch for its client."""

    def __init__(self, body: bytes, receive: Receive, send: Send) -> None:
        self._body: bytes | None = body
        self._receive = receive
        self._send = send
        self._is_complete = False
        self._has_cancelled = False  # the task of the request
        self._has_left = asyncio.Event()

    async def run(self, app: ASGIApp, scope: Scope) -> None:
        """In the task that calls it, which is cancelled when the client leaves; that ends here."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a request is handled in a task")
        watch = asyncio.create_task(self._watch(task))
        try:
            await app(scope, self.receive, self.send)
        except asyncio.CancelledError:
            if not self._has_cancelled or task.cancelling() > 1:
                raise  # the server itself gives this request up
        finally:
            watch.cancel()
            if self._has_cancelled:
                task.uncancel()

    async def receive(self) -> Message:
        """For the application: the body once, then nothing until the client leaves."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._has_left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            # Servers also report "disconnect" after the last byte; clean-up that still runs must not be cancelled.
            self._is_complete = True
        await self._send(message)

    async def _watch(self, task: asyncio.Task[Any]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._is_complete:
            self._has_left.set()
            self._has_cancelled = True
            task.cancel()


def refusal_of_connection(refused: ErrorAnswer) -> Response:
    """The answer to bytes that are no request: with an id, a line in the log and the headers of all answers."""
    response, request_id = refused.response(), new_request_id()
    add_headers(response.raw_headers, request_id)
    _log({"request_id": request_id, "status": refused.status, "code": refused.code or refused.type})
    return response


def _id_of(scope: Scope) -> str:
    """The client's own, if it is fit for a header and a log."""
    given = header(scope, b"x-request-id")
    return given if REQUEST_ID.fullmatch(given) else new_request_id()


def new_request_id() -> str:
    return f"req_{random_id()}"


def add_headers(headers: list[tuple[bytes, bytes]], request_id: str) -> None:
    """To those of an answer, which keep their own values but for the id."""
    given = {name for name, _ in headers}
    if b"x-request-id" in given:
        headers[:] = [item for item in headers if item[0] != b"x-request-id"]
    headers.append((b"x-request-id", request_id.encode("latin-1")))
    headers += [item for item in HEADERS if item[0] not in given]


def _log(fields: Mapping[str, object]) -> None:
    access_logger.info(logfmt(fields), extra={"fields": fields})


def path_template(scope: Scope, routes: Sequence[BaseRoute]) -> str:
    """The route of a request, as metrics name it; "unmatched" if there is none. A request that was refused before it
    was routed has the route that it would have reached.
    """
    route = scope.get("route") or next((one for one in routes if one.matches(scope)[0] is Match.FULL), None)
    return getattr(route, "path", "unmatched")


def logfmt(fields: Mapping[str, object]) -> str:
    """key=value pairs on one line; values with spaces or control characters are quoted."""
    return " ".join([f"{key}={_quoted(value) if isinstance(value, str) else value}" for key, value in fields.items()])


def _quoted(text: str) -> str:
    return text if PLAIN.fullmatch(text) else json.dumps(text)
