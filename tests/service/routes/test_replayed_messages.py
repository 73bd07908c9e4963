"""What stock clients send back of earlier answers, and query parameters as they are written."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.fakes import FakeBackend
from tests.support.gateway import error_of, gateway

USER = {"role": "user", "content": "x"}
PLAIN_REPLAY = {
    "role": "assistant", "content": "x", "refusal": None, "annotations": [], "audio": None, "function_call": None,
    "tool_calls": None,
}  # fmt: skip


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None},
        {"role": "assistant"},
        {"role": "assistant", "content": None, "tool_calls": []},
        PLAIN_REPLAY,
        {**USER, "name": "bob"},
    ],
)
async def test_X11_a_replayed_message_is_accepted(message: dict[str, Any]) -> None:
    async with gateway(FakeBackend()) as server:
        body = {"messages": [USER, message, USER], "tool_choice": "none", "max_tokens": 1}
        response = await server.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]}, "tool_calls"),
        ({"role": "tool", "content": "x", "tool_call_id": "a"}, "tool_call_id"),
        ({"role": "user"}, "content"),
        ({"role": "user", "content": None}, "content"),
        ({"role": "user", "content": "x", "name": 5}, "name"),
    ],
)
async def test_X11_what_is_not_supported_is_refused_by_its_field(message: dict[str, Any], param: str) -> None:
    async with gateway(FakeBackend()) as server:
        response = await server.client.post("/v1/chat/completions", json={"messages": [USER, message]})
    assert response.status_code == 400
    assert param in str(error_of(response)["param"])


@pytest.mark.parametrize("text", [{}, {"format": None}, {"format": {"type": "text"}, "verbosity": "medium"}])
async def test_X11_the_usual_text_options_of_a_response_are_accepted(text: dict[str, Any]) -> None:
    async with gateway(FakeBackend()) as server:
        body = {"input": "x", "text": text, "max_output_tokens": 1}
        assert (await server.client.post("/v1/responses", json=body)).status_code == 200


@pytest.mark.parametrize("query", ["limit=1&limit=2", "limit=1.0", "limit=01", "limit=%2B1", "limit=%201", "limit=1_0"])
async def test_X23_a_number_in_a_query_is_written_plainly_and_once(query: str) -> None:
    async with gateway(FakeBackend()) as server:
        response = await server.client.get(f"/v1/sessions?{query}")
        assert response.status_code == 400
        assert error_of(response)["param"] == "limit"
        assert (await server.client.get("/v1/sessions?limit=1")).status_code == 200


@pytest.mark.parametrize(
    ("name", "hint"),
    [("features", None), ("temprature", "temperature"), ("max_token", "max_tokens"), ("stops", "stop")],
)
async def test_X23_a_hint_names_a_misspelt_field_alone(name: str, hint: str | None) -> None:
    async with gateway(FakeBackend()) as server:
        error = error_of(await server.client.post("/v1/completions", json={"prompt": "x", name: 1}))
    assert ("did you mean" in error["message"]) == (hint is not None)
    assert hint is None or hint in error["message"]


async def test_X23_a_bad_stop_string_is_shown_as_json() -> None:
    async with gateway(FakeBackend()) as server:
        error = error_of(await server.client.post("/v1/completions", json={"prompt": "x", "stop": ""}))
    assert error["message"].endswith('got [""]')
