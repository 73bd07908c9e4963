"""The HTTP benchmark on real sockets: our own gateway, and peers that do less or behave badly."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from nsm_core.errors import ConfigError, NsmError
from nsm_lab.bench.http_bench import bench_http
from nsm_lab.bench.http_client import Endpoint
from nsm_lab.bench.http_load import HttpWork
from tests.support.fakes import FakeBackend
from tests.support.gateway import gateway

WORK = HttpWork(concurrencies=(1, 3), num_tokens=5, lengths=(20,), repeats=2)
LOAD = {"ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "e2e_p90_ms", "tokens_per_s"}


@contextlib.asynccontextmanager
async def peer(*answers: bytes) -> AsyncIterator[Endpoint]:
    """A server that gives each connection the next answer, whatever it is asked; the last one for ever."""
    left = list(answers)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(left.pop(0) if len(left) > 1 else left[0])
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield Endpoint(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")


def stream(*events: dict[str, Any], end: bytes = b"data: [DONE]\n\n") -> bytes:
    """As servers send it that frame a body by the end of the connection."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    return head + b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in events) + end


USAGE = {"choices": [], "usage": {"prompt_tokens": 20, "completion_tokens": 5}}
TEXT = {"choices": [{"text": "a"}]}


async def test_our_own_gateway_has_all_measures() -> None:
    async with gateway(FakeBackend(), is_live=True) as server:
        done: list[int] = []
        result = await bench_http(Endpoint(server.url), WORK, pid=None, on_progress=done.append)
        names = {measure.name for measure in result.measures}
        assert done == [1, 2]
        assert {f"stream.{number}.{figure}" for number in (1, 3) for figure in LOAD} <= names
        assert {"prefill.20.tokens_per_s", "conversation.20.continued_ms", "session.20.resumed_ms"} <= names
        assert not any("cpu" in name or "rss" in name for name in names)
        assert all(len(measure.values) == 2 for measure in result.measures)
        assert result.subject == {"url": server.url, "models": ["fake-nsm"]}
        assert (await server.client.get("/v1/sessions")).json()["data"] == []


async def test_with_its_process_known_a_server_has_cpu_and_memory() -> None:
    import os

    async with gateway(FakeBackend(), is_live=True) as server:
        result = await bench_http(Endpoint(f"{server.url}/v1/"), WORK, pid=os.getpid(), on_progress=lambda _: None)
        assert result.by_name()["memory.server.rss_mb"].median > 10


async def test_a_peer_without_sessions_and_model_list_is_measured_without_them() -> None:
    async with peer(stream(TEXT, TEXT, USAGE)) as endpoint:
        work = HttpWork(concurrencies=(2,), num_tokens=5, lengths=(20,), repeats=1)
        result = await bench_http(endpoint, work, pid=None, on_progress=lambda _: None)
        assert {measure.name.split(".")[0] for measure in result.measures} == {"stream", "prefill", "conversation"}
        assert result.subject["models"] == []


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 503 Overloaded\r\n\r\nbusy", "status 503: busy"),
        (stream(TEXT, end=b""), "ended without"),
        (stream({"error": {"message": "out of memory"}}), "out of memory"),
        (stream(TEXT), "include_usage"),
        (stream(end=b"data: {\n\n"), "not JSON"),
        (b"", "0 bytes read"),
    ],
)
async def test_a_server_that_fails_is_no_result(answer: bytes, message: str) -> None:
    async with peer(answer) as endpoint:
        with pytest.raises(NsmError, match=message):
            await bench_http(endpoint, WORK, pid=None, on_progress=lambda _: None)


async def test_a_server_that_is_not_there_is_told() -> None:
    async with peer(b"") as endpoint:
        pass
    with pytest.raises(NsmError, match="Connect call failed"):
        await bench_http(endpoint, WORK, pid=None, on_progress=lambda _: None)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://", "unix:/x"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="must be http://HOST"):
        Endpoint(url)


async def test_a_process_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="no process 4194305"):
        await bench_http(Endpoint("http://127.0.0.1:1"), WORK, pid=4_194_305, on_progress=lambda _: None)
