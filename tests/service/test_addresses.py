"""HTTP_PROXY and its kin are for other machines: nothing on loopback goes through them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from nsm_core.errors import EngineDead
from service.addresses import is_loopback_url
from service.backends.triton.channel import TritonChannel
from service.cli.scrape import scrape
from service.telemetry.tracing.tracing import make_tracing
from tests.support.otlp_receiver import receiving

ROOT = Path(__file__).resolve().parents[2]
METRICS = b'# TYPE nsm_model_info gauge\nnsm_model_info{model_name="tiny"} 1.0\n'


class Recorder(BaseHTTPRequestHandler):
    """Answers everything with metrics, and counts."""

    hits = 0

    def do_GET(self) -> None:
        type(self).hits += 1
        self.send_response(200)
        self.send_header("content-length", str(len(METRICS)))
        self.end_headers()
        self.wfile.write(METRICS)

    def do_POST(self) -> None:
        self.do_GET()

    def do_CONNECT(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""


@contextlib.contextmanager
def recording() -> Iterator[tuple[str, type[Recorder]]]:
    """(URL, where its requests are counted)"""
    kind = type("OneRecorder", (Recorder,), {"hits": 0})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", kind
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Recorder]]:
    for name in [name for name in os.environ if "proxy" in name.lower()]:
        monkeypatch.delenv(name)
    with recording() as (url, recorder):
        for name in ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy"):
            monkeypatch.setenv(name, url)
            monkeypatch.setenv(name.upper(), url)
        yield recorder


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000", True),
        ("https://localhost/x", True),
        ("http://[::1]:8000", True),
        ("127.8.9.1:8001", True),
        ("[::1]:8001", True),
        ("a.localhost:8001", True),
        ("http://10.0.0.1:8000", False),
        ("localhost.example.com:8001", False),
        ("http://example.com/127.0.0.1", False),
        ("http://[oops", False),
        ("", False),
    ],
)
def test_X12_loopback_urls_are_known(url: str, expected: bool) -> None:
    assert is_loopback_url(url) is expected


def test_X12_top_reads_metrics_of_this_machine_directly(proxy: type[Recorder]) -> None:
    with recording() as (url, server):
        scrape(url, None)
        assert (server.hits, proxy.hits) == (1, 0)
    scrape("http://server.invalid:8000", None)  # another machine: as the environment says
    assert proxy.hits == 1


def test_X12_traces_go_to_a_receiver_on_this_machine_directly(
    proxy: type[Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        tracing = make_tracing()
        tracing.tracer.start_span("one").end()
        tracing.shutdown()
    assert (len(receiver.spans), proxy.hits) == (1, 0)


@contextlib.asynccontextmanager
async def listening() -> AsyncIterator[tuple[str, asyncio.Future[bytes]]]:
    """host:port, and the first bytes that come."""
    first: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received = await reader.readexactly(3)
        if not first.done():
            first.set_result(received)
        writer.close()

    async with await asyncio.start_server(take, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", first


async def test_X12_a_triton_server_on_this_machine_is_reached_directly(proxy: type[Recorder]) -> None:
    async with listening() as (address, first):
        channel = TritonChannel(address)
        with pytest.raises(EngineDead):
            await channel.ask({}, timeout_s=20.0)
        assert await asyncio.wait_for(first, 60) == b"PRI"  # HTTP/2, not CONNECT
        await channel.close()
    assert proxy.hits == 0


def test_X12_the_health_check_of_the_image_asks_its_own_container(proxy: type[Recorder]) -> None:
    with recording() as (url, server):
        environ = {**os.environ, "NSM_PORT": url.rpartition(":")[2]}
        command = [sys.executable, "-I", str(ROOT / "deploy" / "image" / "healthy")]
        subprocess.run(command, env=environ, check=True, timeout=60)
        assert (server.hits, proxy.hits) == (1, 0)
