"""One HTTP connection: its limits of memory, and its close while the client still sends."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
import weakref
from http import HTTPStatus
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from nsm_core.engine.stream_pace import Write
from nsm_core.heap import trim_heap
from service.telemetry.request_context import ARRIVAL, WHOLE_BODY
from service.web.head_limits import BoundedHead

MAX_PIPELINED = 16  # requests of a connection that wait for the one before them
LINGER_S = 30.0  # maximum time for which a closed connection still drops incoming data
LINGER_IDLE_S = 2.0  # maximum time between two pieces of that data
MAX_UNREAD_BYTES = 128 * 1024 * 1024  # of all answers that wait for their readers
LARGE_BYTES = 2**20  # of one write
JOINED_BYTES = 4096  # longer writes wait for no others
TRIM_AFTER_S = 1.0  # after a connection with a large answer was lost

logger = logging.getLogger("nsm.connections")


class UnreadAnswers:
    """What connections hold for clients that do not read. Each may hold one large answer; if all hold more than
    `max_bytes`, the one that has waited longest is closed.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: dict[Connection, int] = {}  # bytes, who has waited longest first
        self._is_trimming = False

    def add(self, connection: Connection, num_bytes: int) -> None:
        self._held[connection] = num_bytes
        while len(self._held) > 1 and sum(self._held.values()) > self._max_bytes:
            slowest = next(iter(self._held))
            num_lost = self._held.pop(slowest)
            logger.warning("closed a connection whose client left %d bytes unread: too many wait", num_lost)
            slowest.transport.abort()

    def remove(self, connection: Connection) -> None:
        self._held.pop(connection, None)

    def lose(self, connection: Connection, loop: asyncio.AbstractEventLoop) -> None:
        """The connection is lost. Memory of large answers goes back to the system soon, once for all that go together:
        the C library would keep it in pieces, and an engine at rest has given back its own before.
        """
        if connection.largest_write >= LARGE_BYTES and not self._is_trimming:
            self._is_trimming = True
            loop.call_later(TRIM_AFTER_S, self._trim, loop)
        self.remove(connection)

    def _trim(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_trimming = False
        loop.run_in_executor(None, trim_heap)


class HeldFlow(FlowControl):
    """Reads nothing while the connection has requests waiting: uvicorn alone reads on after each answer."""

    def __init__(self, transport: asyncio.Transport, connection: Connection) -> None:
        super().__init__(transport)
        self._connection = weakref.ref(connection)

    def resume_reading(self) -> None:
        connection = self._connection()
        if connection is None or not connection.is_held():
            super().resume_reading()


class ClosingTransport(asyncio.Transport):
    """The connection's transport, whose `close` the protocol decides. Short writes of one turn of the event loop go
    out together, such as a head and its body: each call of the system costs more than all that led to it.
    """

    __slots__ = ("_connection", "_loop", "_transport", "largest_write", "parts", "write_uncounted")

    def __init__(self, transport: asyncio.Transport, connection: Connection) -> None:
        super().__init__()
        self._transport = transport
        self._connection = weakref.ref(connection)
        self._loop = connection.loop
        self.parts: list[bytes | bytearray | memoryview] = []  # short writes that the next turn of the loop sends
        self.write_uncounted = transport.write  # for those who see to `largest_write`
        self.largest_write = 0  # bytes, since it was last set to 0: a transport keeps them until the last one is sent

    def close(self) -> None:
        connection = self._connection()
        if connection is not None:  # otherwise it is lost, and its socket is closed
            connection.close()

    def is_closing(self) -> bool:
        connection = self._connection()
        return connection is None or connection.is_closing()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if len(data) > self.largest_write:
            self.largest_write = len(data)
        if len(data) > JOINED_BYTES:
            self.flush()
            self._transport.write(data)
            return
        if not self.parts:
            self._loop.call_soon(self.flush)
        self.parts.append(data)

    def flush(self) -> None:
        """All writes so far are the transport's."""
        if self.parts:
            parts, self.parts = self.parts, []
            self._transport.write(parts[0] if len(parts) == 1 else b"".join(parts))

    def abort(self) -> None:
        self.parts.clear()
        self._transport.abort()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)


class DirectWriter:
    """Prepares writes of parts of one request's body, as uvicorn would make them in its own task."""

    __slots__ = ("__weakref__", "_cycle", "is_held", "num_parts")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = weakref.ref(cycle)  # whose scope holds this writer
        self.is_held = False
        self.num_parts = 0

    def __call__(self, data: bytes) -> Write | None:
        """None: the connection cannot take it now, or it is over."""
        cycle = self._cycle()
        if self.is_held or cycle is None or cycle.disconnected or cycle.response_complete:
            return None
        if not cycle.chunked_encoding or cycle.flow.write_paused:
            return None
        transport: ClosingTransport = cycle.transport  # type: ignore[assignment]  # a Connection has no other
        if transport.parts:
            transport.flush()
        part = b"%x\r\n%b\r\n" % (len(data), data)
        transport.largest_write = max(transport.largest_write, len(part))
        self.num_parts += 1
        return functools.partial(transport.write_uncounted, part)


class CycleUntilClose(RequestResponseCycle):
    """Answers a request of HTTP/1.0, which knows no chunks: a body of unknown length ends with the connection."""

    _has_length = True

    async def send(self, message: ASGISendEvent) -> None:
        if message["type"] == "http.response.start":
            self._has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if not self._has_length:
                self.chunked_encoding = False
        elif message["type"] == "http.response.body" and not self._has_length:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class CountedApp:
    """The application, whose parts of answers count as unread while they wait for the ones before them."""

    def __init__(self, app: ASGIApp, connection: Connection) -> None:
        self._app = app
        self._connection = weakref.ref(connection)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_counted(message: Message) -> None:
            connection = self._connection()
            if connection is not None and connection.flow.write_paused:
                connection.count_waiting(len(message.get("body", b"")))
            await send(message)

        await self._app(scope, receive, send_counted)


class Connection(BoundedHead):
    """Holds at most MAX_PIPELINED requests beside the one that is answered. More are dropped: the connection ends
    after the answer to the last one held, as HTTP allows, and the client sends the rest again elsewhere.

    The transport leads to the connection; what a request holds refers to it weakly, so that large answers go with their
    request, when its client leaves, without a collection.

    Lingering close: a socket that is closed with unread bytes in it resets the connection, and the client loses the
    answer. So while the client still sends, only the sending half is closed, and incoming data is dropped.

    `unread`: of all connections of a server.
    """

    unread = UnreadAnswers(MAX_UNREAD_BYTES)

    _is_receiving = False  # a request has begun and is not complete
    _is_cut = False  # further input on this connection is dropped
    _linger_end: asyncio.TimerHandle | None = None
    _linger_idle: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._socket = transport
        self._written = ClosingTransport(transport, self)
        self.transport = self._written
        self.flow = HeldFlow(transport, self)
        self.app = CountedApp(self.app, self)

    def data_received(self, data: bytes) -> None:
        if self._is_lingering():
            self._expect_more()
        elif not self._is_cut:
            super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._linger_end, self._linger_idle):
            if timer is not None:
                timer.cancel()
        self.unread.lose(self, self.loop)
        self.pipeline.clear()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn's own timer would hold a connection that was reset

    def pause_writing(self) -> None:
        super().pause_writing()
        self.unread.add(self, self._written.largest_write)

    @property
    def largest_write(self) -> int:
        """Bytes of the largest write since all writes were sent."""
        return self._written.largest_write

    def count_waiting(self, num_bytes: int) -> None:
        """A part of an answer waits beside what was written."""
        self.unread.add(self, self._written.largest_write + num_bytes)

    def resume_writing(self) -> None:
        self.unread.remove(self)
        self._written.largest_write = 0
        super().resume_writing()

    def on_message_begin(self) -> None:
        self._is_receiving = True
        if len(self.pipeline) >= MAX_PIPELINED and not self._is_cut:
            self._is_cut = True
            self.cycle.keep_alive = False  # the newest one: its answer is the connection's last
        if not self._is_cut:
            super().on_message_begin()
            self.scope["state"][ARRIVAL] = time.monotonic()

    def on_url(self, url: bytes) -> None:
        if not self._is_cut:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_cut:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self._is_cut:
            super().on_headers_complete()
            if self.scope["http_version"] == "1.0":
                self.cycle.__class__ = CycleUntilClose  # uvicorn made it; its task has not begun
            if not self._should_upgrade() and self.scope["method"] != "HEAD":
                self.scope["state"]["part_writer"] = DirectWriter(self.cycle)

    def handle_websocket_upgrade(self) -> None:
        """From here on the connection is the WebSocket's own, whose writes are bounded by waiting for its reader."""
        self._written.flush()
        self.transport = self._socket
        super().handle_websocket_upgrade()

    def on_body(self, body: bytes) -> None:
        if not self._is_cut:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_receiving = False
        if not self._is_cut:
            self.scope["state"][WHOLE_BODY] = True
            super().on_message_complete()

    def _refuse(self, status: HTTPStatus, message: str, code: str) -> None:
        if not self._is_cut:  # dropped input needs no answer; one would stand inside another
            super()._refuse(status, message, code)

    def _is_lingering(self) -> bool:
        return self._linger_end is not None

    def is_held(self) -> bool:
        """Whether nothing is read: requests wait."""
        return bool(self.pipeline) and not self._is_lingering()

    def is_closing(self) -> bool:
        return self._is_lingering() or self._socket.is_closing()

    def close(self) -> None:
        if self.is_closing():
            return
        self._written.flush()
        if not (self._is_receiving or self._is_cut):
            self._socket.close()
            return
        self._linger_end = self.loop.call_later(LINGER_S, self._socket.close)
        self._expect_more()
        self._socket.write_eof()
        self.flow.resume_reading()

    def _expect_more(self) -> None:
        if self._linger_idle is not None:
            self._linger_idle.cancel()
        self._linger_idle = self.loop.call_later(LINGER_IDLE_S, self._socket.close)


def connection_class(head_s: float, *, max_unread_bytes: int = MAX_UNREAD_BYTES) -> type[Connection]:
    """A protocol for `uvicorn.Config(http=…)`. `head_s`: seconds that a request's head may take; `max_unread_bytes`:
    see UnreadAnswers.
    """
    fields: dict[str, Any] = {"head_s": head_s, "unread": UnreadAnswers(max_unread_bytes)}
    return type("Connection", (Connection,), fields)
