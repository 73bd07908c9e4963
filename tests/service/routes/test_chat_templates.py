"""A chat template of the settings stands in place of the model's, in chats, sessions and responses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from nsm_core.errors import ConfigError
from service.settings import load_settings
from tests.nsm_core.test_jinja_template import CHATML
from tests.support.fakes import FakeBackend
from tests.support.gateway import Gateway, error_of, gateway

QUESTION = {"role": "user", "content": "Hello"}


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Gateway]:
    file = tmp_path / "chat.jinja"
    file.write_text(CHATML)
    async with gateway(FakeBackend(), chat_template=str(file)) as opened:
        yield opened


async def text_of(server: Gateway, messages: list[dict[str, str]]) -> str:
    ids = (await server.client.post("/tokenize", json={"messages": messages})).json()["tokens"]
    return str((await server.client.post("/detokenize", json={"tokens": ids})).json()["prompt"])


async def test_chats_are_rendered_by_the_file(server: Gateway) -> None:
    assert await text_of(server, [QUESTION]) == (
        "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    model = (await server.client.get("/v1/models")).json()["data"][0]
    assert model["chat_template"] == "jinja"
    assert (await server.client.get("/tokenizer_info")).json()["chat_template"] == CHATML


async def test_a_chained_response_reads_the_new_turn_alone(server: Gateway) -> None:
    first = (await server.client.post("/v1/responses", json={"input": "Hello", "max_output_tokens": 4})).json()
    second = (
        await server.client.post(
            "/v1/responses",
            json={"input": "And?", "previous_response_id": first["id"], "max_output_tokens": 4},
        )
    ).json()
    added = "<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    num_added = len(server.services.backend.tokenizer.encode(added))
    usage = second["usage"]
    num_computed = usage["input_tokens"] - usage["input_tokens_details"]["cached_tokens"]
    assert num_computed - num_added in (0, 1)  # and the token that the first turn sampled last


async def test_instructions_that_cannot_stand_in_front_are_refused(server: Gateway) -> None:
    response = await server.client.post("/v1/responses", json={"input": "Hello", "instructions": "Be brief."})
    assert response.status_code == 400
    assert error_of(response)["param"] == "instructions"


async def test_a_named_template_is_taken_by_its_name() -> None:
    async with gateway(FakeBackend(), chat_template="rwkv-think-v1") as server:
        assert await text_of(server, [{"role": "user", "content": "a\n\n\nb "}]) == "User: a\nb\n\nAssistant: <think"


def test_a_template_of_no_use_is_refused_at_the_start(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages | length }}")
    for given, says in ((str(file), "turn by turn"), ("chatml", "unknown chat template 'chatml'")):
        with pytest.raises(ConfigError, match=says) as refused:
            load_settings(chat_template=given)
        assert "NSM_CHAT_TEMPLATE" in str(refused.value)


ROUTES = {
    "/v1/chat/completions": {"messages": [QUESTION]},
    "/v1/responses": {"input": "Hello"},
    "/v1/sessions/s1/generate": {"messages": [QUESTION]},
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("effort", [{"reasoning_effort": "none"}, {"reasoning": {"effort": "none"}}], ids=str)
async def test_no_effort_closes_the_thought_that_the_template_opens(route: str, effort: dict[str, object]) -> None:
    backend = FakeBackend(">Hm.</think>\nEmma.")
    async with gateway(backend, chat_template="rwkv-think-v1") as server:
        for more, opening in (({}, "<think"), ({"reasoning_effort": "low"}, "<think"), (effort, "<think>\n</think")):
            await server.client.delete("/v1/sessions/s1")
            await server.client.post("/v1/sessions", json={"id": "s1"})
            answer = await server.client.post(route, json={**ROUTES[route], **more})
            assert answer.status_code == 200, answer.text
            read = backend.tokenizer.decode(list(backend.requests[-1].prompt_ids))
            assert read.endswith(f"User: Hello\n\nAssistant: {opening}")


async def test_model_that_decides_itself_to_think_still_has_its_thought_told_apart() -> None:
    async with gateway(FakeBackend("<think>Hm.</think>\nEmma."), chat_template="rwkv-v1") as server:
        body = {"messages": [QUESTION], "reasoning_effort": "none"}
        answer = (await server.client.post("/v1/chat/completions", json=body)).json()
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Emma.", "Hm.")
