"""Server-sent events: frames, and the response that carries them.

Back-pressure is the transport's own: frames that are ready together are written together, and the next are made when
the socket has taken them. So a slow reader holds one such part here, and the engine's further events wait in the
request's queue, which max_tokens bounds.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, Protocol

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nsm_core.engine.stream_pace import Write
from nsm_core.errors import InvalidRequest
from service.web.errors import answer, report

DONE = b"data: [DONE]\n\n"
# No blank line after it: stock clients take that for an event without data, if an earlier one of the stream had an id.
PING = b": ping\n"
PARTS_AT_ONCE = 16  # of a body, when they are there at once
HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
_MARK = uuid.uuid4().hex  # nothing else in a frame is this string


def frame(data: Mapping[str, Any], *, event: str | None = None, event_id: int | str | None = None) -> bytes:
    """One event; JSON has no raw line breaks, so one data line holds it."""
    head = b"" if event_id is None else b"id: %s\n" % str(event_id).encode()
    if event is not None:
        head += b"event: %s\n" % event.encode()
    return b"%sdata: %s\n\n" % (head, orjson.dumps(data))


def require_within(after: int, *, last: int) -> None:
    """Raises InvalidRequest where a reader has had more than the stream has: its number is another stream's."""
    if after > last:
        raise InvalidRequest(
            f"Last-Event-ID or starting_after must be at most {last}, this stream's last id, got {after}"
        )


class TextFrame:
    """Frames that differ in one string only: their common part is encoded once."""

    __slots__ = ("head", "tail")

    def __init__(self, make: Callable[[str], bytes]) -> None:
        """`make`: the whole frame around a string."""
        self.head, self.tail = make(_MARK).split(orjson.dumps(_MARK))

    def __call__(self, text: str) -> bytes:
        return self.head + orjson.dumps(text) + self.tail


class PartWriter(Protocol):
    """Writes parts of a body without the task that sends it. `is_held`: that task is writing; `num_parts`: so far."""

    is_held: bool
    num_parts: int

    def __call__(self, data: bytes) -> Write | None:
        """What writes the part, to be called before anything else can write; None: it cannot be written now."""
        ...


def write_nothing() -> None:
    """Of tokens without text."""


class DirectText:
    """Writes tokens' texts to the connection at once, without the task that sends the stream."""

    __slots__ = ("_frame", "_head", "_is_event_per_token", "_tail", "_writer")

    def __init__(self, writer: PartWriter, text_frame: TextFrame, *, is_event_per_token: bool) -> None:
        self._writer = writer
        self._head, self._tail = text_frame.head, text_frame.tail
        self._frame = text_frame
        self._is_event_per_token = is_event_per_token

    def __call__(self, texts: Sequence[str]) -> Write | None:
        """What writes the texts of tokens that follow each other; None: they cannot be written now."""
        if self._is_event_per_token:
            data = b"".join(self._frame(text) for text in texts if text)
        else:
            text = texts[0] if len(texts) == 1 else "".join(texts)
            data = self._head + orjson.dumps(text) + self._tail if text else b""  # as `_frame`, without a call
        return self._writer(data) if data else write_nothing


async def until_done(frames: AsyncGenerator[bytes, None], *, request_id: str | None) -> AsyncGenerator[bytes, None]:
    """The frames, then [DONE]. An error becomes one frame before it, because the status has been sent."""
    try:
        async with contextlib.aclosing(frames):
            async for data in frames:
                yield data
                data = b""  # it may have megabytes, and a slow reader holds up the next yield
    except Exception as error:
        report(error, request_id=request_id)
        yield frame(answer(error, request_id=request_id).body())
    yield DONE


class EventStream(Response):
    """Sends the frames of an async generator. In every case the generator is closed and `on_close` is called once.

    `on_close` is there because closing a generator that never started runs none of its code.
    `RequestContext` puts `stream_ping_s`, the silence after which a comment is sent, into the scope's state, and the
    connection `part_writer`, which `on_open` gets: it may be used while the generator waits.
    It never calls `receive`: when the client leaves, the middleware cancels this task.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        *,
        on_close: Callable[[], None] | None = None,
        on_open: Callable[[PartWriter], None] | None = None,
    ) -> None:
        self.frames = frames
        self.on_open = on_open
        self.on_close = on_close
        self.status_code = 200
        self.background = None
        self.init_headers(HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with contextlib.aclosing(self.frames):
                await self._send_all(scope, send)
        finally:
            if self.on_close is not None:
                self.on_close()

    async def _send_all(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        state = scope.get("state", {})
        writer: PartWriter | None = state.get("part_writer")
        if self.on_open is not None and writer is not None:
            self.on_open(writer)
        with Pacer(state.get("send_part", send), state.get("stream_ping_s", 0.0), writer) as pacer:
            async for data in self.frames:
                await pacer.send(data)
                data = b""  # as in `until_done`
                if pacer.num_sent % PARTS_AT_ONCE == 0:
                    await asyncio.sleep(0)  # a busy stream yields to others, and to a cancel
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Pacer:
    """Sends body parts, and inside `with` comments during silences. Clients ignore comments; proxies keep the
    connection open.

    `interval_s`: 0 for no comments. `writer`: sends parts of the same body as well, between those of the task.
    """

    def __init__(self, send: Send, interval_s: float, writer: PartWriter | None = None) -> None:
        self._send = send
        self._writer = writer
        self._interval_s = interval_s
        self._is_sending = False
        self._num_own = 0
        self._num_at_timer = 0
        self._timer: asyncio.TimerHandle | None = None
        self._ping: asyncio.Task[None] | None = None

    def __enter__(self) -> Pacer:
        if self._interval_s:
            self._start_timer()
        return self

    def __exit__(self, *error: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._ping is not None:
            self._ping.cancel()

    @property
    def num_sent(self) -> int:
        """Parts, by whomever."""
        return self._num_own + (0 if self._writer is None else self._writer.num_parts)

    async def send(self, data: bytes) -> None:
        self._hold(True)
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._hold(False)
        self._num_own += 1

    def _hold(self, is_sending: bool) -> None:
        self._is_sending = is_sending
        if self._writer is not None:
            self._writer.is_held = is_sending

    def _start_timer(self) -> None:
        self._num_at_timer = self.num_sent
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._end_interval)

    def _end_interval(self) -> None:
        """No ping while a frame waits for a slow reader, nor another while one does."""
        is_waiting = self._is_sending or (self._ping is not None and not self._ping.done())
        if self._num_at_timer == self.num_sent and not is_waiting:
            self._ping = asyncio.create_task(self._send_ping())
        self._start_timer()

    async def _send_ping(self) -> None:
        await self._send({"type": "http.response.body", "body": PING, "more_body": True})
