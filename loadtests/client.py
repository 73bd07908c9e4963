"""HTTP for load tests: gevent sockets, llhttp's parser, and a clock reading right after each read of the socket.

Not a general client: `requests` and `httpx` read ahead and cost several times the processor time for each piece of a
stream, and Locust's own FastHttpUser hands a body over in blocks of a given size. Here a frame has the time at which
its last byte was received, the receive window can be made small, and a connection can be dropped like that of a
program that was killed. It uses gevent's sockets by name and needs no patched modules.
"""

from __future__ import annotations

import dataclasses
import json
import select
import socket as constants
import struct
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from gevent import socket
from geventhttpclient.response import HTTPParseError, HTTPResponse

from loadtests.sse import Event, EventParser

BLOCK_BYTES = 65_536


class ConnectionBroken(ConnectionError):
    """The server closed the connection before the answer was complete, or sent something that is no such answer."""


@dataclasses.dataclass(frozen=True, slots=True)
class Received:
    """An event and the reading of `time.monotonic()` at which it was complete."""

    at: float
    event: Event


class Response(HTTPResponse):
    """One answer, read piece by piece. `sent_at`: when the last byte of the request was handed over."""

    def __init__(self, connection: Connection, sent_at: float) -> None:
        super().__init__("POST")
        self.sent_at = sent_at
        self.headers_at = 0.0
        self._connection = connection

    def read_headers(self) -> None:
        while not self.headers_complete:
            self.headers_at = self._receive(BLOCK_BYTES)

    def body(self) -> bytes:
        """The time left of it."""
        while not self.message_complete:
            self._receive(BLOCK_BYTES)
        return self._take()

    def json(self) -> dict[str, Any]:
        """Raises ConnectionBroken for a body that is not a JSON object, such as a proxy's page."""
        try:
            parsed = json.loads(self.body())
        except ValueError as error:
            raise ConnectionBroken(f"{self.status_code}, and the body is not JSON") from error
        if not isinstance(parsed, dict):
            raise ConnectionBroken(f"{self.status_code}, and the body is not a JSON object")
        return parsed

    def events(self, *, block_bytes: int = BLOCK_BYTES) -> Iterator[Received]:
        """Server-sent events as they come; at most `block_bytes` are read at a time."""
        parser = EventParser()
        at = self.headers_at
        while True:
            for event in parser.feed(self._take()):
                yield Received(at, event)
            if self.message_complete:
                return
            at = self._receive(block_bytes)

    def header(self, name: str) -> str | None:
        value = self.get(name)
        return value if isinstance(value, str) or value is None else value[0]

    def _receive(self, num_bytes: int) -> float:
        data = self._connection.socket.recv(num_bytes)
        at = time.monotonic()
        if not data:
            raise ConnectionBroken("the server closed the connection before its answer was complete")
        try:
            self.feed(data)
        except HTTPParseError as error:
            raise ConnectionBroken(f"what the server sent is not HTTP: {error}") from error
        return at

    def _take(self) -> bytes:
        taken = bytes(self._body_buffer)
        self._body_buffer.clear()
        return taken


class Connection:
    """One connection, and what to do with it after an answer."""

    def __init__(self, host: str, port: int, *, timeout_s: float, receive_bytes: int | None) -> None:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=constants.SOCK_STREAM)[0]
        self.socket = socket.socket(family, constants.SOCK_STREAM)
        self.socket.settimeout(timeout_s)
        if receive_bytes is not None:  # before it is connected: the window is agreed on then
            self.socket.setsockopt(constants.SOL_SOCKET, constants.SO_RCVBUF, receive_bytes)
        self.socket.setsockopt(constants.IPPROTO_TCP, constants.TCP_NODELAY, 1)
        try:
            self.socket.connect(address)
        except BaseException:
            self.socket.close()
            raise

    @property
    def is_idle(self) -> bool:
        """Whether it is still open, with nothing to be read."""
        poll = select.poll()  # unlike select, for any number of connections
        poll.register(self.socket.fileno(), select.POLLIN)
        return not poll.poll(0)

    def abort(self) -> None:
        """Closes it with a reset, as the kernel does for a process that is killed."""
        self.socket.setsockopt(constants.SOL_SOCKET, constants.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


class Client:
    """One server, by HTTP without TLS; connections are reused. Safe for several greenlets.

    Raises ValueError for any other kind of URL.
    """

    def __init__(self, base_url: str, *, timeout_s: float, receive_bytes: int | None = None) -> None:
        parts = urlsplit(base_url)
        if parts.scheme != "http":
            raise ValueError(f"the client speaks plain HTTP, got {base_url}")
        self.base_url = base_url
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._authority = parts.netloc
        self._timeout_s = timeout_s
        self._receive_bytes = receive_bytes
        self._idle: list[Connection] = []

    def open(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None
    ) -> Exchange:
        """Sends a request; its answer's head is read inside `with`."""
        return Exchange(self, _encode(method, path, self._authority, body, headers or {}))

    def request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, dict[str, Any]]:
        """Status and JSON of an answer that is not streamed."""
        with self.open(method, path, body, headers) as response:
            return response.status_code, response.json()

    def take(self) -> Connection:
        """An idle connection, or a new one."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_idle:
                return connection
            connection.socket.close()
        return Connection(self._host, self._port, timeout_s=self._timeout_s, receive_bytes=self._receive_bytes)

    def give_back(self, connection: Connection) -> None:
        self._idle.append(connection)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().socket.close()


class Exchange:
    """A request and its answer. Left before the answer is complete, the connection is aborted."""

    def __init__(self, client: Client, request: bytes) -> None:
        self._client = client
        self._request = request
        self._connection: Connection | None = None
        self._response: Response | None = None

    def __enter__(self) -> Response:
        self._connection = self._client.take()
        try:
            self._connection.socket.sendall(self._request)
            self._response = Response(self._connection, time.monotonic())
            self._response.read_headers()
        except BaseException:
            self._connection.abort()
            raise
        return self._response

    def __exit__(self, *_: object) -> None:
        assert self._connection is not None
        assert self._response is not None
        if self._response.message_complete and self._response.should_keep_alive():
            self._client.give_back(self._connection)
        else:
            self._connection.abort()


def _encode(method: str, path: str, host: str, body: Mapping[str, Any] | None, headers: Mapping[str, str]) -> bytes:
    raw = b"" if body is None else json.dumps(body).encode()
    fields = {"Host": host, "Content-Length": str(len(raw)), "Content-Type": "application/json", **headers}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + raw
