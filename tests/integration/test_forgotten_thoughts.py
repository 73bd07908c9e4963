"""Turns of a chat whose template drops thoughts: each stands on the messages and answers before it, not on thoughts.

What a session's log holds is the oracle: a prompt of just these ids gets the same answer.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from nsm_core.tokenizer import Tokenizer
from service.stores.redis.url import parse_redis_url
from service.stores.sessions.key import SessionKey
from service.stores.sessions.redis import RedisSessionStore
from service.stores.sessions.sqlite import SqliteSessionStore
from tests.support.backends import MakeBackend
from tests.support.fakes import FakeBackend
from tests.support.gateway import Gateway, gateway
from tests.support.redis_servers import Topology
from tests.support.responses import counts_of, log_of, respond, session_ids, text_of
from tests.support.rwkv7 import rwkv7_backend

TEMPLATE = "rwkv-think-v1"
QUESTIONS = ["Who wrote it? " * 12, "When was that?", "And why?"]
SCRIPTS = [(TEMPLATE, ">Hm, who?</think>\nEmma."), ("rwkv-v1", " <think>Hm, who?</think>\nEmma.")]
SAMPLING = {"temperature": 0.8, "seed": 3}


@pytest.fixture
async def server(make_backend: MakeBackend) -> AsyncIterator[Gateway]:
    async with gateway(make_backend(), chat_template=TEMPLATE) as opened:
        yield opened


async def read_text(server: Gateway, session_id: str) -> str:
    return server.services.backend.tokenizer.decode((await log_of(server, session_id))[1:])


async def say(server: Gateway, text: str, **body: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8, **body}
    response = await server.client.post("/v1/sessions/s/generate", json=body)
    assert response.status_code == 200, response.text
    return dict(response.json())


async def last_answer_again(server: Gateway, session_id: str) -> str:
    """What a prompt of the ids that the newest turn stood on gets."""
    marks = await server.services.store.log_marks(SessionKey("default", session_id))
    ids = await log_of(server, session_id)
    num_sampled = marks[-1].num_sampled
    body = {"prompt": list(ids[: len(ids) - num_sampled]), "max_tokens": num_sampled, **SAMPLING}
    response = await server.client.post("/v1/completions", json=body)
    return str(response.json()["choices"][0]["text"])


@pytest.mark.parametrize(("template", "script"), SCRIPTS)
async def test_a_chain_reads_answers_without_their_thoughts(template: str, script: str) -> None:
    async with gateway(FakeBackend(script), chat_template=template) as server:
        first = await respond(server, "Who?", max_output_tokens=100)
        second = await respond(server, "Sure?", previous_response_id=first["id"], max_output_tokens=100)
        (session_id,) = await session_ids(server)
        opening = " <think" if template == TEMPLATE else ""
        before = "User: Who?\n\nAssistant: Emma.\n\nUser: Sure?\n\nAssistant:"
        assert await read_text(server, session_id) == before + opening + script
        again = await respond(server, "Truly?", previous_response_id=first["id"], max_output_tokens=100)
        third = await respond(server, "Well?", previous_response_id=second["id"], max_output_tokens=100)
        (fork,) = set(await session_ids(server)) - {session_id}
        assert await read_text(server, fork) == before.replace("Sure?", "Truly?") + opening + script
        after = before + " Emma.\n\nUser: Well?\n\nAssistant:"
        assert await read_text(server, session_id) == after + opening + script
        assert [item["type"] for item in third["output"]] == ["reasoning", "message"]
        assert text_of(again) == text_of(third)


@pytest.mark.parametrize(("template", "script"), SCRIPTS)
async def test_instructions_and_unstored_responses_stand_on_the_same_text(template: str, script: str) -> None:
    backend = FakeBackend(script)
    async with gateway(backend, chat_template=template) as server:
        first = await respond(server, "Who?", max_output_tokens=100)
        opening = " <think" if template == TEMPLATE else ""
        text = "User: Who?\n\nAssistant: Emma.\n\nUser: Sure?\n\nAssistant:" + opening
        chained = {"previous_response_id": first["id"], "max_output_tokens": 100}
        await respond(server, "Sure?", instructions="Be kind.", **chained)
        decode = server.services.backend.tokenizer.decode
        assert decode(backend.requests[-1].prompt_ids[1:]) == "System: Be kind.\n\n" + text
        counted = await server.client.post("/v1/responses/input_tokens", json={"input": "Sure?", **chained_id(first)})
        free = await respond(server, "Sure?", store=False, **chained)
        assert counted.json()["input_tokens"] == free["usage"]["input_tokens"]
        assert await session_ids(server) != []


def chained_id(response: dict[str, Any]) -> dict[str, Any]:
    return {"previous_response_id": response["id"]}


@pytest.mark.parametrize(("template", "script"), SCRIPTS)
async def test_a_session_that_is_given_messages_reads_answers_without_their_thoughts(
    template: str, script: str
) -> None:
    async with gateway(FakeBackend(script), chat_template=template) as server:
        await server.client.post("/v1/sessions", json={"id": "s"})
        versions = []
        for text in ("Who?", "Sure?"):
            versions.append((await say(server, text, max_tokens=100))["session"]["version"])
        opening = " <think" if template == TEMPLATE else ""
        before = "User: Who?\n\nAssistant: Emma.\n\nUser: Sure?\n\nAssistant:"
        assert await read_text(server, "s") == before + opening + script
        assert versions == [2, 4]
        closed = await say(server, "a form", max_tokens=100, response_format={"type": "json_object"})
        text = await read_text(server, "s")
        assert closed["session"]["version"] == 5
        assert text.startswith(before + " Emma.\n\nUser: a form\n\nAssistant:")


async def test_only_an_answer_that_thinks_is_two_versions() -> None:
    async with gateway(FakeBackend(" Emma."), chat_template="rwkv-v1") as server:
        await server.client.post("/v1/sessions", json={"id": "s"})
        versions = [(await say(server, text, max_tokens=100))["session"]["version"] for text in ("Who?", "Sure?")]
        assert versions == [1, 2]
        assert (await read_text(server, "s")).count("Emma.") == 2


async def test_R6_a_chain_goes_on_from_the_message_border_and_reads_nothing_again(server: Gateway) -> None:
    """A random model thinks to its end, so that its answers are empty."""
    previous: dict[str, Any] = {}
    end = 0
    for text in QUESTIONS:
        chained = chained_id(previous) if previous else {}
        previous = await respond(server, text, max_output_tokens=8, **SAMPLING, **chained)
        num_input, num_cached = counts_of(previous)
        assert num_cached == end
        (session_id,) = await session_ids(server)
        thought = previous["output"][0]["content"][0]["text"]
        assert thought.strip() == (await last_answer_again(server, session_id)).removeprefix(">").strip()
        marks = await server.services.store.log_marks(SessionKey("default", session_id))
        end = marks[-2].num_log_tokens
        assert marks[-1].num_log_tokens == num_input + marks[-1].num_sampled


async def test_R6_a_session_goes_on_from_the_message_border_and_reads_nothing_again(server: Gateway) -> None:
    await server.client.post("/v1/sessions", json={"id": "s"})
    end, version = 0, 0
    for text in QUESTIONS:
        answer = await say(server, text, expected_version=version, **SAMPLING)
        version = answer["session"]["version"]
        usage = answer["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == end
        assert answer["choices"][0]["text"] == await last_answer_again(server, "s")
        end = (await server.services.store.log_marks(SessionKey("default", "s")))[-2].num_log_tokens
    usual = await server.client.post("/v1/sessions/s/generate", json={"input": " and", "max_tokens": 4, **SAMPLING})
    assert usual.json()["session"]["version"] == version + 1
    assert usual.json()["choices"][0]["text"] == await last_answer_again(server, "s")


async def ask_in_turn(servers: list[Gateway]) -> list[str]:
    """A chain whose turns each run on the next server."""
    texts: list[str] = []
    previous: dict[str, Any] = {}
    for number, text in enumerate(QUESTIONS):
        server = servers[number % len(servers)]
        previous = await respond(server, text, max_output_tokens=8, **SAMPLING, **previous)
        texts.append(previous["output"][0]["content"][0]["text"])
        previous = chained_id(previous)
    return texts


@pytest.mark.redis
@pytest.mark.parametrize("state_dtype", ["fp32", "int8"])
async def test_R5_another_gateway_goes_on_from_the_border(
    state_dtype: str, tiny_tokenizer: Tokenizer, redis_single: Topology
) -> None:
    fields: dict[str, Any] = {"chat_template": TEMPLATE, "state_dtype": state_dtype}

    def backend() -> Any:
        return rwkv7_backend(tiny_tokenizer)

    async with gateway(backend(), **fields) as alone:
        want = await ask_in_turn([alone])
    address = parse_redis_url(redis_single.own_url())
    async with (
        gateway(backend(), store=RedisSessionStore(address), **fields) as one,
        gateway(backend(), store=RedisSessionStore(address), **fields) as two,
    ):
        assert await ask_in_turn([one, two]) == want


@pytest.mark.parametrize("state_dtype", ["fp32", "int8"])
async def test_R5_after_a_restart_it_goes_on_from_the_stored_border(
    state_dtype: str, tiny_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "sessions.db"
    previous: dict[str, Any] = {}
    texts: list[str] = []
    cached: list[int] = []
    fields: dict[str, Any] = {"chat_template": TEMPLATE, "state_dtype": state_dtype, "snapshot_tokens": 16}
    for text in QUESTIONS:
        async with gateway(rwkv7_backend(tiny_tokenizer), store=SqliteSessionStore(path), **fields) as server:
            answer = await respond(server, text, max_output_tokens=8, **SAMPLING, **previous)
            texts.append(answer["output"][0]["content"][0]["text"])
            cached.append(counts_of(answer)[1])
            previous = chained_id(answer)
    async with gateway(rwkv7_backend(tiny_tokenizer), **fields) as alone:
        assert texts == await ask_in_turn([alone])
    assert cached[1] > 100
    assert cached[2] >= cached[1]
