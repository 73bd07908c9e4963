"""The services of docker-compose.yml, started natively from the same files, and used through the proxy."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import redis
import websockets

from tests.deploy.native_services import (
    GatewayProcess,
    Proxy,
    Redis,
    gateway_services,
    proxy_service,
    redis_service,
)
from tests.support.prometheus_server import prometheus
from tests.support.redis_servers import wait_until

pytestmark = [pytest.mark.redis, pytest.mark.nginx]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclasses.dataclass(frozen=True)
class Services:
    redis: Redis
    gateways: list[GatewayProcess]
    proxy: Proxy
    client: httpx.Client

    def say(self, session_id: str, text: str) -> httpx.Response:
        body = {"input": text, "max_tokens": 4, "ignore_eos": True, "temperature": 0}
        return self.client.post(f"/v1/sessions/{session_id}/generate", json=body)

    def gateways_of(self, path: str) -> list[str]:
        """Which gateway answered each request for a path, in order."""
        return [str(line["gateway"]) for line in self.proxy.asked() if line["path"] == path]


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Iterator[Services]:
    directory = tmp_path_factory.mktemp("services")
    with (
        redis_service(directory / "redis") as store,
        gateway_services(directory / "gateways", 2, store.url, tiny_model_dir) as gateways,
        proxy_service(directory / "proxy", [one.address for one in gateways]) as proxy,
        httpx.Client(base_url=proxy.url, timeout=60.0) as client,
    ):
        yield Services(store, gateways, proxy, client)


def test_redis_keeps_what_it_is_told_and_asks_for_the_password(services: Services) -> None:
    with services.redis.client(None) as stranger, pytest.raises(redis.AuthenticationError):
        stranger.ping()
    with services.redis.client(services.redis.password) as client:
        wanted = {"appendonly": "yes", "maxmemory-policy": "noeviction", "save": "", "maxmemory": str(256 << 20)}
        assert {name: client.config_get(name)[name] for name in wanted} == wanted
        with pytest.raises(redis.ResponseError, match="unknown command"):
            client.flushall()
    assert services.redis.health() == 0
    assert "redis-server" in services.redis.shown()
    assert services.redis.password not in services.redis.shown()


def test_a_session_stays_at_the_gateway_that_the_proxy_chose(services: Services) -> None:
    names, used = [f"s{number}" for number in range(8)], set()
    for name in names:
        assert services.client.post("/v1/sessions", json={"id": name}).status_code == 200
        answers = [services.say(name, f"turn {number}") for number in range(3)]
        assert [answer.json()["session"]["version"] for answer in answers] == [1, 2, 3]
    for name in names:
        path = f"/v1/sessions/{name}/generate"
        wait_until(lambda: len(services.gateways_of(path)) == 3, "the last line of the proxy's log")  # noqa: B023
        (gateway,) = set(services.gateways_of(path))
        used.add(gateway)
    assert used == {one.address for one in services.gateways}


def test_a_session_goes_on_at_any_gateway(services: Services) -> None:
    assert services.client.post("/v1/sessions", json={"id": "any"}).status_code == 200
    body = {"input": "a turn", "max_tokens": 4, "ignore_eos": True}
    for version in range(1, 5):
        address = services.gateways[version % 2].address
        answer = httpx.post(f"http://{address}/v1/sessions/any/generate", json=body, timeout=60.0)
        assert answer.json()["session"]["version"] == version


def test_a_completion_arrives_in_pieces_with_the_headers_of_the_gateway(services: Services) -> None:
    body = {"model": "tiny", "prompt": "It was", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    model = services.client.get("/v1/models").json()["data"][0]["id"]
    with services.client.stream("POST", "/v1/completions", json={**body, "model": model}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert "content-encoding" not in answer.headers
        assert answer.headers["x-request-id"]
        pieces = iter(answer.iter_raw())
        first = [next(pieces) for _ in range(3)]
    assert all(piece.startswith(b"data: ") for piece in first)  # whole frames, not blocks of a buffer
    assert all(len(piece) < 2000 for piece in first)


async def test_a_live_socket_passes_the_proxy_and_stays_at_its_sessions_gateway(services: Services) -> None:
    assert services.client.post("/v1/sessions", json={"id": "live"}).status_code == 200
    for version in (0, 1):
        url = f"{services.proxy.url.replace('http', 'ws', 1)}/v1/realtime?session=live"
        async with websockets.connect(url) as socket:
            assert json.loads(await socket.recv())["type"] == "session.created"
            content = [{"type": "input_text", "text": "more"}]
            item = {"type": "message", "role": "user", "content": content}
            await socket.send(json.dumps({"type": "conversation.item.create", "item": item}))
            await socket.send(json.dumps({"type": "response.create", "response": {"max_output_tokens": 3}}))
            events = [json.loads(await socket.recv())]
            while events[-1]["type"] not in ("response.done", "error"):
                events.append(json.loads(await socket.recv()))
            assert events[-1]["type"] == "response.done", events
        assert services.say("live", "on").json()["session"]["version"] == 3 * (version + 1)  # item, answer, turn
    wait_until(lambda: len(services.gateways_of("/v1/realtime")) == 2, "the last line of the proxy's log")
    wait_until(lambda: len(services.gateways_of("/v1/sessions/live/generate")) == 2, "the last line of the proxy's log")
    used = {*services.gateways_of("/v1/realtime"), *services.gateways_of("/v1/sessions/live/generate")}
    assert len(used) == 1


def test_a_session_reads_text_through_the_proxy_as_it_comes(services: Services) -> None:
    """The second piece is sent when the first has been committed."""
    assert services.client.post("/v1/sessions", json={"id": "fed"}).status_code == 200

    def position() -> int:
        return int(services.client.get("/v1/sessions/fed").json()["position"])

    def pieces() -> Iterator[bytes]:
        yield b"".join(json.dumps({"text": "word " * 50}).encode() + b"\n" for _ in range(60))
        wait_until(lambda: position() > 0, "the commit of the first pieces")
        yield json.dumps({"text": "the end"}).encode() + b"\n"

    ndjson = {"content-type": "application/x-ndjson"}
    answer = services.client.post("/v1/sessions/fed/append", content=pieces(), headers=ndjson)
    assert answer.status_code == 200, answer.text


def test_what_tells_of_all_tenants_stays_inside(services: Services) -> None:
    for path in ("/metrics", "/metrics/", "/%6Detrics", "//metrics"):
        answer = services.client.get(f"{str(services.client.base_url).rstrip('/')}{path}")  # "//..." alone names a host
        assert answer.status_code == 404, path
        assert answer.json()["error"]["type"] == "not_found_error", path
    for one in services.gateways:
        assert "nsm_" in httpx.get(f"http://{one.address}/metrics").text
    assert services.client.get("/health/ready").status_code == 200


def test_a_body_that_is_too_large_is_refused_before_a_gateway_sees_it(services: Services) -> None:
    json_body = {"content-type": "application/json"}
    answer = services.client.post("/v1/completions", content=b" " * (8 * 1024 * 1024 + 1), headers=json_body)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"
    large = services.client.post("/v1/completions", content=b" " * (8 * 1024 * 1024), headers=json_body)
    assert large.status_code == 400  # the gateway's own: it is no JSON


@pytest.mark.prometheus
def test_prometheus_sees_both_gateways(services: Services, tmp_path: Path) -> None:
    targets = {"nsm": [one.address for one in services.gateways], "triton": []}
    with prometheus(tmp_path, targets, "none") as server:

        def up() -> list[float]:
            return [value for _, value in server.query('up{job="nsm"}', at=time.time())]

        wait_until(lambda: up() == [1.0, 1.0], "the first scrape of both gateways")
        assert {group["name"] for group in server.get("rules")["groups"]}


def test_the_loss_of_a_gateway_is_not_seen(services: Services, tmp_path: Path, tiny_model_dir: Path) -> None:
    """Connections are refused, and the proxy asks the other."""
    names = [f"lost{number}" for number in range(4)]
    with (
        gateway_services(tmp_path / "gateways", 1, services.redis.url, tiny_model_dir) as (lost,),
        proxy_service(tmp_path / "proxy", [lost.address, services.gateways[1].address]) as proxy,
        httpx.Client(base_url=proxy.url, timeout=60.0) as client,
    ):
        own = dataclasses.replace(services, proxy=proxy, client=client)
        for name in names:
            assert client.post("/v1/sessions", json={"id": name}).status_code == 200
        assert {own.say(name, "turn 0").status_code for name in names} == {200}
        asked = [f"/v1/sessions/{name}/generate" for name in names]
        wait_until(lambda: all(len(own.gateways_of(path)) == 1 for path in asked), "the last line of the proxy's log")
        assert lost.address in {own.gateways_of(path)[0] for path in asked}
        lost.process.kill()
        lost.process.wait()
        for name in names:
            answers = [own.say(name, f"turn {number}") for number in range(1, 4)]
            assert [answer.status_code for answer in answers] == [200] * 3
            assert answers[-1].json()["session"]["version"] == 4


class SlowGateway:
    """A server whose stream goes on only when it is told to, on one connection at a time."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.may_go_on = threading.Semaphore(0)
        self.client_left = threading.Event()

    def serve(self, num_frames: int) -> None:
        connection, _ = self.listener.accept()
        with connection:
            connection.settimeout(60.0)
            while not connection.recv(65536).endswith(b"\r\n\r\n"):
                pass
            connection.sendall(HEAD)
            for number in range(num_frames):
                assert self.may_go_on.acquire(timeout=60)
                connection.sendall(b"%x\r\ndata: %d\n\n\r\n" % (len(f"data: {number}\n\n"), number))
            if connection.recv(1) == b"":
                self.client_left.set()


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[tuple[SlowGateway, Proxy]]:
    gateway = SlowGateway()
    with contextlib.closing(gateway.listener), proxy_service(tmp_path / "proxy", [gateway.address]) as proxy:
        yield gateway, proxy


def test_P1_each_frame_leaves_before_the_next_is_made_and_a_client_that_leaves_is_noticed(
    slow: tuple[SlowGateway, Proxy],
) -> None:
    gateway, proxy = slow
    serving = threading.Thread(target=gateway.serve, args=(5,))
    serving.start()
    with httpx.stream("GET", f"{proxy.url}/v1/streams/any", timeout=60.0) as answer:
        pieces = answer.iter_raw()
        for number in range(5):
            gateway.may_go_on.release()  # only now is the frame written
            assert next(pieces) == b"data: %d\n\n" % number
    assert gateway.client_left.wait(60)
    serving.join()


def test_without_gateways_clients_are_told_to_try_again(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    with proxy_service(tmp_path / "proxy", [address]) as proxy:
        answer = httpx.post(f"{proxy.url}/v1/completions?secret=1", json={"prompt": "secret"})
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "unavailable"
        wait_until(lambda: len(proxy.asked()) == 1, "the line of the proxy's log")
    line = proxy.asked()[0]
    assert (line["path"], line["status"]) == ("/v1/completions", 503)
    assert "secret" not in json.dumps(line)
