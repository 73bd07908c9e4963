"""Thoughts in answers: told apart by their tags, however the text comes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsm_core.thoughts import ThoughtReader
from nsm_core.tokenizer import Tokenizer
from tests.support.fakes import FakeBackend
from tests.support.gateway import Gateway, frames_of, gateway
from tests.support.rwkv7 import rwkv7_backend
from tests.support.schemas import MAX_TOKENS, POINT, check_json

CASES = [
    (False, "<think>\nWho?\n\nEmma.\n</think>\n\nIt is Emma. ", "Who?\n\nEmma.", "It is Emma. "),
    (False, "  <think>Who?</think>Emma", "Who?", "Emma"),
    (False, "Emma <think>x</think>", "", "Emma <think>x</think>"),
    (False, "<thin air", "", "<thin air"),
    (False, "", "", ""),
    (False, "<think>never ended </thi", "never ended </thi", ""),
    (True, " Who?</think>\nEmma", "Who?", "Emma"),
    (True, "</think>Emma", "", "Emma"),
    (True, "Who? ", "Who?", ""),
    (True, "a < b </thought> c</think>d</think>", "a < b </thought> c", "d</think>"),
]


def read(text: str, cuts: list[int], *, is_open: bool) -> tuple[str, str]:
    reader = ThoughtReader(is_open=is_open)
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = [part for start, end in itertools.pairwise(borders) for part in reader.feed(text[start:end])]
    parts += reader.finish()
    thought = "".join(part.text for part in parts if part.is_thought)
    return thought, "".join(part.text for part in parts if not part.is_thought)


@pytest.mark.parametrize(("is_open", "text", "thought", "answer"), CASES)
def test_a_thought_ends_at_its_tag(is_open: bool, text: str, thought: str, answer: str) -> None:
    assert read(text, [], is_open=is_open) == (thought, answer)


@given(st.sampled_from(CASES), st.lists(st.integers(0, 60), max_size=8))
def test_the_cuts_of_a_text_change_nothing(case: tuple[bool, str, str, str], cuts: list[int]) -> None:
    is_open, text, thought, answer = case
    assert read(text, cuts, is_open=is_open) == (thought, answer)


async def chat(server: Gateway, **body: Any) -> Any:
    fields = {"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 100, **body}
    response = await server.client.post("/v1/chat/completions", json=fields)
    assert response.status_code == 200, response.text
    return response


@pytest.mark.parametrize(
    ("template", "script"),
    [("rwkv-think-v1", ">Hm, who?</think>\nEmma."), ("rwkv-v1", "<think>Hm, who?</think>\nEmma.")],
)
async def test_a_chat_tells_the_thought_beside_the_answer(template: str, script: str) -> None:
    async with gateway(FakeBackend(script), chat_template=template) as server:
        message = (await chat(server)).json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm, who?", "Emma.")
        frames = frames_of((await chat(server, stream=True)).text)
        deltas = [frame["choices"][0]["delta"] for frame in frames]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm, who?"
        assert "".join(delta.get("content", "") for delta in deltas) == "Emma."
        again = [
            {"role": "user", "content": "Who?"},
            {"role": "assistant", **message},
            {"role": "user", "content": "?"},
        ]
        for one in again:
            one.pop("refusal", None)
        counted = await server.client.post("/tokenize", json={"messages": again, "return_token_strs": True})
        assert "Hm, who" not in "".join(counted.json()["token_strs"])


async def test_an_answer_without_tags_and_one_in_a_form_are_as_they_are() -> None:
    async with gateway(FakeBackend("Emma."), chat_template="rwkv-v1") as server:
        message = (await chat(server)).json()["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "Emma.", "refusal": None}
    async with gateway(FakeBackend("<think>Hm</think>Emma.")) as server:  # plain-v1 has no thoughts
        assert (await chat(server)).json()["choices"][0]["message"]["content"] == "<think>Hm</think>Emma."


FUNCTION = {"name": "locate", "parameters": POINT}
CHAT_TOOLS = {"tools": [{"type": "function", "function": FUNCTION}]}
TOOLS = {"tools": [{"type": "function", **FUNCTION}]}
FORM = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT}}
MESSAGES = {"messages": [{"role": "user", "content": "Where?"}]}
CHAT, RESPONSES, TURN = "/v1/chat/completions", "/v1/responses", "/v1/sessions/s/generate"
IN_A_FORM: list[tuple[str, dict[str, Any]]] = [
    (CHAT, MESSAGES | CHAT_TOOLS | {"tool_choice": "required"}),
    (CHAT, MESSAGES | {"response_format": FORM}),
    (CHAT, MESSAGES | CHAT_TOOLS | {"response_format": FORM}),
    (RESPONSES, {"input": "Where?", **TOOLS, "tool_choice": "required"}),
    (RESPONSES, {"input": "Where?", "store": False, **TOOLS, "tool_choice": {"type": "function", "name": "locate"}}),
    (RESPONSES, {"input": "Where?", "text": {"format": {"type": "json_schema", "name": "point", "schema": POINT}}}),
    (TURN, MESSAGES | {"guided_json": POINT}),
]
FREE: list[tuple[str, dict[str, Any]]] = [
    (CHAT, MESSAGES),
    (CHAT, MESSAGES | CHAT_TOOLS),
    (RESPONSES, {"input": "Where?", **TOOLS}),
    (TURN, MESSAGES),
]


@pytest.mark.parametrize(
    ("path", "body", "end"),
    [(*case, "User: Where?\n\nAssistant: <think>\n</think") for case in IN_A_FORM]
    + [(*case, "User: Where?\n\nAssistant: <think") for case in FREE],
)
async def test_only_an_answer_in_a_form_begins_after_an_empty_thought(
    path: str, body: dict[str, Any], end: str
) -> None:
    backend = FakeBackend(">")
    async with gateway(backend, chat_template="rwkv-think-v1") as server:
        assert (await server.client.post("/v1/sessions", json={"id": "s"})).status_code == 200
        response = await server.client.post(path, json=body)
        assert response.status_code == 200, response.text
    assert backend.tokenizer.decode(backend.requests[-1].prompt_ids).endswith(end)


async def test_a_call_that_must_come_is_no_thought(tiny_tokenizer: Tokenizer) -> None:
    async with gateway(rwkv7_backend(tiny_tokenizer), chat_template="rwkv-think-v1") as server:
        forced = CHAT_TOOLS | {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 2 * MAX_TOKENS}
        message = (await chat(server, **forced)).json()["choices"][0]["message"]
        assert "reasoning_content" not in message
        check_json(message["tool_calls"][0]["function"]["arguments"], POINT)
        fields = {"input": "Where?", "text": {"format": IN_A_FORM[5][1]["text"]["format"]}, "max_output_tokens": 300}
        (item,) = (await server.client.post(RESPONSES, json=fields)).json()["output"]
        check_json(item["content"][0]["text"], POINT)
