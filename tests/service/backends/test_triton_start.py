"""Which servers a gateway's backend takes: at its start, and when one comes back."""

from __future__ import annotations

import pytest

from nsm_core.errors import ConfigError, EngineDead
from nsm_core.tokenizer import Tokenizer
from service.backends.triton.backend import TritonBackend
from tests.nsm_core.engine.harness import make_request
from tests.support.triton_servers import eventually
from tests.support.triton_stand_in import (
    StandIn,
    hurry,
    is_up,
    random_loaded,
    running_backend,
    stand_ins,
)


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


@pytest.mark.parametrize("other", [{"fingerprint": "other"}, {"numerics": "cuda/fp32"}], ids=str)
async def test_R11_servers_of_different_models_are_refused_at_the_start(
    tiny_tokenizer: Tokenizer, other: dict[str, str]
) -> None:
    one, two = StandIn(random_loaded(tiny_tokenizer)), StandIn(random_loaded(tiny_tokenizer, **other))
    async with stand_ins(one, two):
        with pytest.raises(ConfigError, match="this gateway serves"):
            async with running_backend(one, two):
                pass


async def test_a_server_of_another_model_than_the_settings_name_is_refused(tiny_tokenizer: Tokenizer) -> None:
    server = StandIn(random_loaded(tiny_tokenizer))
    async with stand_ins(server):
        with pytest.raises(ConfigError, match="NSM_MODEL has wanted"):
            async with running_backend(server, fingerprint="wanted"):
                pass


async def test_a_server_that_comes_back_with_another_model_is_not_used(tiny_tokenizer: Tokenizer) -> None:
    one, two = (StandIn(random_loaded(tiny_tokenizer)) for _ in range(2))
    async with stand_ins(one, two), running_backend(one, two) as backend:
        await one.stop()
        await eventually(lambda: is_up(backend, 1))
        one.loaded = random_loaded(tiny_tokenizer, fingerprint="new")
        await one.start()

        async def is_refused() -> bool:
            return isinstance(next(iter(backend.upstreams)).error, ConfigError)

        await eventually(is_refused)
        assert backend.is_ready()


async def test_a_start_without_any_server_says_whom_it_asked(tiny_tokenizer: Tokenizer) -> None:
    server = StandIn(random_loaded(tiny_tokenizer))
    with pytest.raises(ConfigError, match=f"no Triton server of NSM_TRITON_URL is ready: {server.url}: the connection"):
        async with running_backend(server, wait_s=1.5):
            pass


async def test_before_the_start_there_is_no_model() -> None:
    backend = TritonBackend(["127.0.0.1:1"], wait_s=1.0)
    with pytest.raises(EngineDead):
        _ = backend.model
    with pytest.raises(EngineDead):
        backend.submit(make_request())
    assert not backend.is_ready()
