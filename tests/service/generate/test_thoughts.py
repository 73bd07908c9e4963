"""Thoughts in answers: told apart by their tags, however the text comes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.generate.thoughts import ThoughtReader
from tests.support.fakes import FakeBackend
from tests.support.gateway import Gateway, frames_of, gateway

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
