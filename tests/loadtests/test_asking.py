"""The client of the load tests against a server that sends pieces by hand: what it measures, and when."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
USAGE = {"prompt_tokens": 30, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 20}}
PAUSE_S = 0.2
ALLOWED_MS = 60.0
MAX_TRIES = 20  # of which one must be undisturbed: other programs have cores, too


def frame(text: str, event_id: int, reason: str | None = None) -> bytes:
    body = {"id": "cmpl-1", "choices": [{"text": text, "finish_reason": reason}]}
    return f"id: {event_id}\ndata: {json.dumps(body)}\n\n".encode()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class HandServer:
    """Each path is a way to answer; counts connections."""

    def __init__(self) -> None:
        self.num_connections = 0
        self.aborted = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = int(head.lower().partition("content-length: ")[2].partition("\r\n")[0])
                await reader.readexactly(length)
                await getattr(self, head.split()[1].removeprefix("/"))(writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.aborted.set()
        finally:
            writer.close()

    async def paced(self, writer: asyncio.StreamWriter) -> None:
        """First text after a pause; then two pieces in one write; then the rest, cut inside its last piece's line."""
        writer.write(HEAD)
        await asyncio.sleep(PAUSE_S)
        writer.write(chunk(frame("a", 1)))
        await asyncio.sleep(PAUSE_S)
        writer.write(chunk(frame("b", 2) + frame("c", 3)))
        last = frame("d", 4)
        writer.write(chunk(last[:20]))
        await asyncio.sleep(PAUSE_S)
        writer.write(chunk(last[20:]))
        usage = json.dumps({"id": "cmpl-1", "choices": [], "usage": USAGE})
        writer.write(chunk(frame("", 5, "length") + f"data: {usage}\n\ndata: [DONE]\n\n".encode()) + b"0\r\n\r\n")
        await writer.drain()

    async def cut(self, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunk(frame("a", 1)))
        await writer.drain()
        writer.close()

    async def undone(self, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunk(frame("a", 1)) + b"0\r\n\r\n")
        await writer.drain()

    async def endless(self, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        for number in range(10_000):
            writer.write(chunk(frame("a", number)))
            await writer.drain()
            await asyncio.sleep(0.001)

    async def full(self, writer: asyncio.StreamWriter) -> None:
        body = b'{"error": {"code": "overloaded"}}'
        fields = b"retry-after: 3\r\ncontent-length: %d\r\n\r\n" % len(body)
        writer.write(b"HTTP/1.1 503 Service Unavailable\r\n" + fields + body)
        await writer.drain()


@contextlib.asynccontextmanager
async def hand_server() -> AsyncIterator[tuple[HandServer, str]]:
    hand = HandServer()
    server = await asyncio.start_server(hand.serve, "127.0.0.1", 0)
    async with server:
        yield hand, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def ask(url: str, *requests: dict[str, Any]) -> list[dict[str, Any]]:
    """In a process of its own: gevent stays out of this one."""
    command = [sys.executable, "-m", "tests.loadtests.asking_process", url, json.dumps(requests)]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert process.returncode == 0
    return list(json.loads(output))


async def until_times_are(url: str, request: dict[str, Any], **wanted_ms: Any) -> dict[str, Any]:
    """The answer to the first of several equal requests whose times are these."""
    for _ in range(MAX_TRIES):
        (result,) = await ask(url, request)
        found = {name: result["sample"][name] for name in wanted_ms}
        if all(found[name] == pytest.approx(wanted, abs=ALLOWED_MS) for name, wanted in wanted_ms.items()):
            return result
    raise AssertionError(f"none of {MAX_TRIES} tries had times like {wanted_ms}; the last was {found}")


async def test_B1_times_are_those_of_the_socket() -> None:
    pause_ms = PAUSE_S * 1000
    async with hand_server() as (_, url):
        # not that of the headers; what comes in one read has one time; a piece is there when its last byte is
        times = {"ttft_ms": pause_ms, "itl_ms": [pause_ms, 0.0, pause_ms], "e2e_ms": 3 * pause_ms}
        result = await until_times_are(url, {"path": "/paced"}, **times)
    sample = result["sample"]
    assert (sample["outcome"], result["text"], result["ids"]) == ("ok", "abcd", [1, 2, 3, 4, 5])
    assert sample["itl_ms"][1] == 0.0


async def test_B2_tokens_are_those_of_the_usage() -> None:
    async with hand_server() as (_, url):
        (result,) = await ask(url, {"path": "/paced"})
    sample = result["sample"]
    assert (sample["tokens"], sample["prompt_tokens"], sample["resumed_tokens"]) == (7, 30, 20)


async def test_B4_a_late_start_makes_the_latency_longer() -> None:
    async with hand_server() as (_, url):
        request = {"path": "/paced", "late_s": 2.0}
        await until_times_are(url, request, lag_ms=2000, ttft_ms=2000 + PAUSE_S * 1000)


async def test_an_answer_that_is_not_whole_is_a_failure() -> None:
    async with hand_server() as (_, url):
        cut, undone = await ask(url, {"path": "/cut"}, {"path": "/undone"})
    assert cut["sample"]["outcome"] == undone["sample"]["outcome"] == "failed"
    assert "before its answer was complete" in cut["sample"]["problem"]
    assert "[DONE]" in undone["sample"]["problem"]


async def test_leaving_resets_the_connection() -> None:
    async with hand_server() as (hand, url):
        (result,) = await ask(url, {"path": "/endless", "reader": {"leave_after": 2}})
        await asyncio.wait_for(hand.aborted.wait(), 60)
    assert result["sample"]["outcome"] == "cancelled"
    assert result["text"] == "aa"


async def test_a_refusal_tells_when_to_come_back_and_keeps_the_connection() -> None:
    async with hand_server() as (hand, url):
        first, second = await ask(url, {"path": "/full"}, {"path": "/full"})
    for result in (first, second):
        sample = result["sample"]
        assert (sample["outcome"], sample["status"], sample["retry_after_s"]) == ("rejected", 503, 3.0)
        assert sample["ttft_ms"] is None
        assert sample["e2e_ms"] > 0
    assert hand.num_connections == 1
