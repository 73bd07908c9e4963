"""Stateless requests on a real engine: with stored prefixes they say what they say without, and read less."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nsm_core.tokenizer import Tokenizer
from service.stores.prefixes.base import PrefixBounds
from service.stores.prefixes.keys import MIN_TOKENS
from service.stores.prefixes.memory import MemoryPrefixStore
from service.stores.prefixes.redis import RedisPrefixStore
from service.stores.redis.url import parse_redis_url
from tests.support.backends import MakeBackend
from tests.support.counts import scaled
from tests.support.gateway import Gateway, frames_of, gateway
from tests.support.models import local_backend
from tests.support.redis_servers import Topology
from tests.support.rwkv7 import rwkv7_backend
from tests.support.tenants import make_key, write_keys

BOUNDS = PrefixBounds(max_bytes=2**24, ttl_s=60.0)
SYSTEM = "You are a clerk who copies letters by hand, all day long and every day of the year. " * 6


@pytest.fixture
async def plain(make_backend: MakeBackend) -> AsyncIterator[Gateway]:
    async with gateway(make_backend(), prefix_cache_mb=0) as opened:
        yield opened


@pytest.fixture
async def cached(make_backend: MakeBackend) -> AsyncIterator[Gateway]:
    async with gateway(make_backend()) as opened:
        yield opened


async def complete(server: Gateway, headers: dict[str, str] | None = None, **body: Any) -> dict[str, Any]:
    fields = {"seed": 1, "ignore_eos": True, "max_tokens": 8, **body}
    response = await server.client.post("/v1/completions", json=fields, headers=headers)
    assert response.status_code == 200, response.text
    await server.services.prefix_resume.drain()
    return dict(response.json())


def cached_tokens(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def computed_tokens(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens"]) - cached_tokens(answer)


def ids(length: int, *, seed: int = 1) -> list[int]:
    return [(seed * 7919 + index * 31) % 511 + 1 for index in range(length)]


async def test_a_prompt_that_goes_on_after_an_answer_reads_only_what_is_new(cached: Gateway, plain: Gateway) -> None:
    prompt = ids(150)
    for turn in range(4):
        fields = {"prompt": prompt, "max_tokens": 80, "temperature": 1.0, "logprobs": 0, "seed": turn}
        got, want = await complete(cached, **fields), await complete(plain, **fields)
        assert got["choices"][0]["text"] == want["choices"][0]["text"]
        assert got["usage"]["prompt_tokens"] == want["usage"]["prompt_tokens"] == len(prompt)
        # all but the answer's last token, which was sampled and not fed, and what comes now
        assert computed_tokens(got) == (150 if turn == 0 else 11)
        prompt = prompt + sampled_ids(cached, got) + ids(10, seed=turn + 2)


def sampled_ids(server: Gateway, answer: dict[str, Any]) -> list[int]:
    tokenizer = server.services.backend.tokenizer
    names = {}
    for token_id in range(1, tokenizer.vocab_size):
        raw = tokenizer.token_bytes(token_id)
        try:
            names[raw.decode()] = token_id
        except UnicodeDecodeError:
            names["bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)] = token_id
    return [names.get(token, 0) for token in answer["choices"][0]["logprobs"]["tokens"]]


async def test_a_growing_chat_with_the_stock_client_reads_about_the_same_each_turn(
    make_backend: MakeBackend, plain: Gateway
) -> None:
    async with gateway(make_backend(), is_live=True) as cached:
        await talk(cached, plain)


async def talk(cached: Gateway, plain: Gateway) -> None:
    messages: list[dict[str, str]] = [{"role": "system", "content": SYSTEM}]
    computed = []
    for turn in range(6):
        messages.append({"role": "user", "content": f"Copy letter number {turn}, if you please."})
        fields: dict[str, Any] = {
            "model": cached.services.model_name,
            "messages": messages,
            "max_tokens": 40,
            "seed": turn,
        }
        got = await cached.openai.chat.completions.create(**fields)
        want = (await plain.client.post("/v1/chat/completions", json=fields)).json()
        await cached.services.prefix_resume.drain()
        assert got.choices[0].message.content == want["choices"][0]["message"]["content"]
        assert got.usage is not None
        assert got.usage.prompt_tokens_details is not None
        computed.append(got.usage.prompt_tokens - (got.usage.prompt_tokens_details.cached_tokens or 0))
        messages.append({"role": "assistant", "content": got.choices[0].message.content or ""})
    assert computed[0] > 150
    assert max(computed[1:]) < 200  # an answer of random bytes is longer when it is encoded again
    assert cached.metric("nsm_prefix_resume_total", outcome="hit") == 5
    assert cached.metric("nsm_tokens_resumed_total") == cached.metric("nsm_prefix_cache_hits_total") > 800


async def test_the_usage_of_a_stream_tells_the_same(cached: Gateway) -> None:
    await complete(cached, prompt=ids(100))
    body = {"prompt": ids(120), "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}
    frames = frames_of((await cached.client.post("/v1/completions", json=body)).text)
    assert frames[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 100}
    assert frames[-1]["usage"]["prompt_tokens"] == 120


async def test_R10_R11_one_new_token_and_none_equal_the_unbroken_run(cached: Gateway, plain: Gateway) -> None:
    """With none, the state at the prompt's end would have read its last token twice: an earlier one is used."""
    await complete(cached, prompt=ids(128))
    for length, num_cached in ((129, 128), (128, 0), (128, 64), (127, 64)):
        fields = {"prompt": ids(length), "max_tokens": 20, "temperature": 1.0}
        got, want = await complete(cached, **fields), await complete(plain, **fields)
        assert (cached_tokens(got), got["choices"]) == (num_cached, want["choices"])


async def test_prompts_that_part_are_met_at_the_place_where_they_do(cached: Gateway, plain: Gateway) -> None:
    """The second prompt shows that the beginning is shared, the third starts there."""
    expected = [0, 0, 192, 192]
    for number, num_cached in enumerate(expected):
        fields = {"prompt": [*ids(200), *ids(50, seed=number + 2)], "max_tokens": 6}
        got, want = await complete(cached, **fields), await complete(plain, **fields)
        assert (cached_tokens(got), got["choices"]) == (num_cached, want["choices"])


async def test_all_choices_of_a_prompt_share_its_state(cached: Gateway, plain: Gateway) -> None:
    await complete(cached, prompt=ids(100))
    fields = {"prompt": [ids(110), ids(90, seed=5)], "n": 3, "temperature": 1.0}
    got, want = await complete(cached, **fields), await complete(plain, **fields)
    assert got["choices"] == want["choices"]
    assert cached_tokens(got) == 100


async def test_scores_of_a_prompt_are_of_all_of_it(cached: Gateway, plain: Gateway) -> None:
    await complete(cached, prompt=ids(100))
    fields = {"prompt": ids(110), "echo": True, "logprobs": 0, "max_tokens": 0}
    got, want = await complete(cached, **fields), await complete(plain, **fields)
    assert (got["choices"], cached_tokens(got)) == (want["choices"], 0)


async def test_off_switches(cached: Gateway, plain: Gateway, make_backend: MakeBackend, tmp_path: Path) -> None:
    await complete(cached, prompt=ids(100), cache_prompt=False)
    assert cached_tokens(await complete(cached, prompt=ids(110))) == 0
    assert cached_tokens(await complete(cached, prompt=ids(120), cache_prompt=False)) == 0
    assert cached_tokens(await complete(cached, prompt=ids(120))) == 110  # kept by the second request
    assert cached.metric("nsm_prefix_resume_total", outcome="off") == 2
    await complete(plain, prompt=ids(100))
    assert cached_tokens(await complete(plain, prompt=ids(110))) == 0
    assert plain.metric("nsm_prefix_resume_total", outcome="off") == 2
    for server, is_on in ((cached, True), (plain, False)):
        assert (await server.client.get("/v1/models")).json()["data"][0]["prefix_cache"] is is_on
    key = make_key("quiet")
    path = write_keys(tmp_path / "keys.toml", key, quiet="prefix_cache = false")
    async with gateway(make_backend(), api_keys_file=path) as server:
        for _ in range(2):
            assert cached_tokens(await complete(server, key.headers, prompt=ids(110))) == 0
        assert server.metric("nsm_prefix_saved_total", outcome="stored") == 0


async def test_L1_L5_no_tenant_resumes_anothers_prompt(make_backend: MakeBackend, tmp_path: Path) -> None:
    """Canaries: each tenant tells a secret; whoever asks with another's whole prompt computes all of it, every time."""
    keys = {f"t{number}": make_key(f"t{number}") for number in range(scaled(4, 50))}
    path = write_keys(tmp_path / "keys.toml", *keys.values(), **dict.fromkeys(keys, ""))
    async with gateway(make_backend(), api_keys_file=path) as server:
        secrets = {name: ids(130, seed=number + 3) for number, name in enumerate(keys)}
        for name, key in keys.items():
            await complete(server, key.headers, prompt=secrets[name])
        for name, secret in secrets.items():
            for other, key in keys.items():
                answer = await complete(server, key.headers, prompt=[*secret, 7], max_tokens=1)
                assert cached_tokens(answer) == (130 if other == name else 0)


@pytest.mark.redis
@pytest.mark.parametrize("topology_name", ["redis_single", "redis_cluster"])
async def test_P4_two_gateways_on_one_redis_resume_each_others_prefixes(
    topology_name: str, request: pytest.FixtureRequest, make_backend: MakeBackend
) -> None:
    topology: Topology = request.getfixturevalue(topology_name)
    address = parse_redis_url(topology.own_url())
    async with contextlib.AsyncExitStack() as stack:
        one, two = [
            await stack.enter_async_context(gateway(make_backend(), prefixes=RedisPrefixStore(address, BOUNDS)))
            for _ in range(2)
        ]
        await complete(one, prompt=ids(100))
        assert cached_tokens(await complete(two, prompt=ids(200))) == 100
        assert cached_tokens(await complete(one, prompt=ids(210))) == 200


@pytest.mark.redis
async def test_prefixes_in_redis_survive_a_restart_but_not_another_model(
    make_backend: MakeBackend, tiny_tokenizer: Tokenizer, redis_single: Topology
) -> None:
    address = parse_redis_url(redis_single.own_url())
    async with gateway(make_backend(), prefixes=RedisPrefixStore(address, BOUNDS)) as server:
        await complete(server, prompt=ids(100))
    async with gateway(make_backend(), prefixes=RedisPrefixStore(address, BOUNDS)) as server:
        assert cached_tokens(await complete(server, prompt=ids(110))) == 100
    other = local_backend(tiny_tokenizer, fingerprint="another")
    async with gateway(other, prefixes=RedisPrefixStore(address, BOUNDS)) as server:
        assert cached_tokens(await complete(server, prompt=ids(110))) == 0


PROMPTS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 3 * MIN_TOKENS), st.integers(0, 20), st.booleans()),
    min_size=2,
    max_size=6,
)


# the fixture keeps nothing from one example to the next
@settings(max_examples=scaled(4, 300), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(PROMPTS)
async def test_R6_any_prompts_get_the_answers_that_they_get_without(
    make_backend: MakeBackend, shapes: list[tuple[int, int, int, bool]]
) -> None:
    """Prompts from three texts, cut anywhere, with any tail; some go on from the answer before."""
    entry = MIN_TOKENS * 4 + 5_000
    small = PrefixBounds(max_bytes=6 * entry, ttl_s=60.0)
    async with (
        gateway(make_backend(), prefixes=MemoryPrefixStore(small)) as cached,
        gateway(make_backend(), prefix_cache_mb=0) as plain,
    ):
        before: list[int] = []
        for number, (text, length, tail, goes_on) in enumerate(shapes):
            prompt = [*(before if goes_on else []), *ids(length, seed=text + 1), *ids(tail, seed=number + 9)]
            fields = {"prompt": prompt, "temperature": number % 2, "max_tokens": 70, "logprobs": 0}
            got, want = await complete(cached, **fields), await complete(plain, **fields)
            assert got["choices"][0]["text"] == want["choices"][0]["text"]
            assert got["usage"]["prompt_tokens"] == want["usage"]["prompt_tokens"]
            before = [*prompt, *sampled_ids(cached, got)]


@pytest.mark.parametrize("template", ["rwkv-think-v1", "rwkv-v1", "rwkv-no-think-v1"])
async def test_a_chat_that_drops_its_thoughts_goes_on_from_the_message_border(
    template: str, tiny_tokenizer: Tokenizer
) -> None:
    """An answer begins inside a thought, which the client does not send back: nothing before it is read again."""
    messages = [{"role": "system", "content": SYSTEM}]
    async with (
        gateway(rwkv7_backend(tiny_tokenizer), chat_template=template) as cached,
        gateway(rwkv7_backend(tiny_tokenizer), chat_template=template, prefix_cache_mb=0) as plain,
    ):
        before = 0
        for turn in range(4):
            messages.append({"role": "user", "content": f"Copy letter number {turn}. " + "It is a long one. " * 20})
            body = {"messages": messages, "max_tokens": 12, "seed": turn, "stop": ["</think>"]}
            got, want = await ask_chat(cached, body), await ask_chat(plain, body)
            assert got["choices"][0]["message"] == want["choices"][0]["message"]
            assert cached_tokens(want) == 0
            # the end of the prompt before, less what a thought began with and what the next text changed of it
            assert cached_tokens(got) >= before - 8
            assert (cached_tokens(got) > 0) == (turn > 0)
            before = got["usage"]["prompt_tokens"]
            messages.append({"role": "assistant", "content": "As you wish."})


async def ask_chat(server: Gateway, body: dict[str, Any]) -> dict[str, Any]:
    response = await server.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    await server.services.prefix_resume.drain()
    return dict(response.json())
