"""TLS to Triton servers with real certificates, on a stand-in for the server; the real one in tests/deploy."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from nsm_core.errors import ConfigError
from nsm_core.tokenizer import Tokenizer
from nsm_core.wire.call_tensors import encode_call
from nsm_core.wire.calls import StatusCall
from service.backends.triton import upstream as triton_upstream
from service.backends.triton.backend import TritonBackend
from service.backends.triton.channel import TritonChannel, Unreached
from service.backends.triton.tls import TritonTls
from tests.nsm_core.engine.harness import Outcome, make_request
from tests.support.certificates import Authority, Certificate
from tests.support.redis_servers import free_port
from tests.support.triton_servers import eventually
from tests.support.triton_stand_in import StandIn, random_loaded, stand_ins


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.create(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.create(tmp_path_factory.mktemp("tls") / "theirs")


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_upstream, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(triton_upstream, "RETRY_MIN_S", 0.05)


def server_credentials(own: Certificate, client_ca: Path | None = None) -> grpc.ServerCredentials:
    pair = (own.key.read_bytes(), own.cert.read_bytes())
    ca = None if client_ca is None else client_ca.read_bytes()
    return grpc.ssl_server_credentials([pair], root_certificates=ca, require_client_auth=ca is not None)


@contextlib.asynccontextmanager
async def served(
    tokenizer: Tokenizer, own: Certificate | None, client_ca: Path | None = None
) -> AsyncIterator[StandIn]:
    server = StandIn(random_loaded(tokenizer))
    server.credentials = None if own is None else server_credentials(own, client_ca)
    async with stand_ins(server):
        yield server


async def generates(server: StandIn, tls: TritonTls | None) -> bool:
    backend = TritonBackend([server.url], wait_s=60, tls=tls)
    await backend.start()
    try:
        request = make_request("a", prompt_ids=(1, 2), max_tokens=3)
        return len(Outcome([event async for event in backend.submit(request).events()]).ids) == 3
    finally:
        await backend.stop()


async def reason_against(server: StandIn, tls: TritonTls | None) -> str:
    """Why a gateway that starts does not use the server."""
    backend = TritonBackend([server.url], wait_s=60, tls=tls)
    starting = asyncio.create_task(backend.start())

    async def is_refused() -> bool:
        return any(upstream.error is not None for upstream in backend.upstreams)

    await eventually(is_refused)
    (upstream,) = backend.upstreams
    assert not starting.done()
    starting.cancel()
    await asyncio.wait((starting,))
    return str(upstream.error)


async def test_requests_over_tls(ours: Authority, tiny_tokenizer: Tokenizer) -> None:
    async with served(tiny_tokenizer, ours.issue("server")) as server:
        assert await generates(server, TritonTls.read(ca=ours.ca.cert))


async def test_requests_with_a_certificate_of_the_client(ours: Authority, tiny_tokenizer: Tokenizer) -> None:
    own = ours.issue("client")
    async with served(tiny_tokenizer, ours.issue("server"), ours.ca.cert) as server:
        assert await generates(server, TritonTls.read(ca=ours.ca.cert, cert=own.cert, key=own.key))


async def test_a_certificate_for_another_name_needs_that_name(ours: Authority, tiny_tokenizer: Tokenizer) -> None:
    async with served(tiny_tokenizer, ours.issue("server", hosts="DNS:triton.internal")) as server:
        assert await generates(server, TritonTls.read(ca=ours.ca.cert, server_name="triton.internal"))
        reported = await reason_against(server, TritonTls.read(ca=ours.ca.cert))
    assert "its certificate is for another name than its address" in reported


async def test_a_server_of_another_ca_is_refused_and_the_reason_told(
    ours: Authority, theirs: Authority, tiny_tokenizer: Tokenizer
) -> None:
    async with served(tiny_tokenizer, theirs.issue("server")) as server:
        reported = await reason_against(server, TritonTls.read(ca=ours.ca.cert))
    assert "its certificate was not signed by the CA that this side trusts" in reported


@pytest.mark.parametrize("client", ["without a certificate", "with one of another CA", "without TLS"])
async def test_a_server_that_hangs_up_at_once(
    client: str, ours: Authority, theirs: Authority, tiny_tokenizer: Tokenizer
) -> None:
    wrong = theirs.issue("client")
    tls = {
        "without a certificate": TritonTls.read(ca=ours.ca.cert),
        "with one of another CA": TritonTls.read(ca=ours.ca.cert, cert=wrong.cert, key=wrong.key),
        "without TLS": None,
    }
    async with served(tiny_tokenizer, ours.issue("server"), ours.ca.cert) as server:
        reported = await reason_against(server, tls[client])
    assert "hung up at once, as servers do that want TLS, or another certificate" in reported


async def test_an_address_without_listener_is_refused_by_name() -> None:
    channel = TritonChannel(f"127.0.0.1:{free_port()}")
    try:
        with pytest.raises(Unreached, match="Connection refused"):
            await channel.ask(encode_call(StatusCall()), timeout_s=60.0)
    finally:
        await channel.close()


async def test_a_server_without_tls_is_not_spoken_to_in_the_clear(ours: Authority, tiny_tokenizer: Tokenizer) -> None:
    async with served(tiny_tokenizer, None) as server:
        assert "it speaks without TLS" in await reason_against(server, TritonTls.read(ca=ours.ca.cert))


@pytest.mark.usefixtures("hasty")
async def test_a_server_that_comes_back_with_a_certificate_of_another_ca_makes_the_gateway_unready(
    ours: Authority, theirs: Authority, tiny_tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    own, foreign = ours.issue("server"), theirs.issue("server")

    async def is_unready() -> bool:
        return not backend.is_ready()

    async def is_reported() -> bool:
        return "was not signed by the CA that this side trusts" in caplog.text

    async def is_ready() -> bool:
        return backend.is_ready()

    async with served(tiny_tokenizer, own) as server:
        backend = TritonBackend([server.url], wait_s=60, tls=TritonTls.read(ca=ours.ca.cert))
        await backend.start()
        try:
            assert backend.is_ready()
            await server.stop()
            server.credentials = server_credentials(foreign)
            with caplog.at_level(logging.WARNING, logger="nsm.triton"):
                await server.start()
                await eventually(is_reported)
            assert await is_unready()
            await server.stop()
            server.credentials = server_credentials(own)
            await server.start()
            await eventually(is_ready)
        finally:
            await backend.stop()


def test_files_are_checked_when_they_are_read(ours: Authority, tmp_path: Path) -> None:
    ca, one, two = ours.ca.cert, ours.issue("one"), ours.issue("two")
    locked = tmp_path / "locked.key"
    encrypt = ["openssl", "pkey", "-in", one.key, "-aes256", "-passout", "pass:secret", "-out", locked]
    subprocess.run(encrypt, check=True, capture_output=True)
    nowhere, junk = tmp_path / "nowhere.pem", tmp_path / "junk.pem"
    junk.write_text("junk")
    for file in (nowhere, junk, one.key):
        with pytest.raises(ConfigError, match=f"{file.name} is no file with certificates of a CA"):
            TritonTls.read(ca=file)
    for key in (nowhere, junk, two.key, locked):
        with pytest.raises(ConfigError, match=rf"one\.pem and .*{key.name} are no certificate and its key"):
            TritonTls.read(ca=ca, cert=one.cert, key=key)
    with pytest.raises(ConfigError, match="needs its key"):
        TritonTls.read(ca=ca, cert=one.cert)


def test_a_key_is_not_shown(ours: Authority) -> None:
    own = ours.issue("own")
    assert "PRIVATE" not in repr(TritonTls.read(ca=ours.ca.cert, cert=own.cert, key=own.key))
