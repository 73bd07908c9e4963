"""A gateway for tests of /v1/responses, and the steps that they take again and again."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from service.stores.sessions.key import SessionKey
from tests.support.fakes import FakeBackend
from tests.support.gateway import Gateway, gateway, without_comments

PATH = "/v1/responses"
FIRST_EVENTS = (
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
)
LAST_EVENTS = ("response.output_text.done", "response.content_part.done", "response.output_item.done")
SCRIPT = " It was"  # what the backend of these tests answers


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend(SCRIPT)


@pytest.fixture
async def server(backend: FakeBackend) -> AsyncIterator[Gateway]:
    async with gateway(backend) as opened:
        yield opened


def encode(server: Gateway, text: str) -> tuple[int, ...]:
    return tuple(server.services.backend.tokenizer.encode(text))


async def respond(server: Gateway, text: str = "hello", /, **body: Any) -> dict[str, Any]:
    response = await server.client.post(PATH, json={"input": text, **body})
    assert response.status_code == 200, response.text
    return dict(response.json())


async def get(server: Gateway, response_id: str) -> dict[str, Any]:
    response = await server.client.get(f"{PATH}/{response_id}")
    assert response.status_code == 200, response.text
    return dict(response.json())


async def session_ids(server: Gateway) -> list[str]:
    return [head["id"] for head in (await server.client.get("/v1/sessions")).json()["data"]]


async def log_of(server: Gateway, session_id: str) -> tuple[int, ...]:
    return await server.services.store.read_log(SessionKey("default", session_id))


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])


def counts_of(response: dict[str, Any]) -> tuple[int, int]:
    """Input tokens, and those of them that were resumed."""
    usage = response["usage"]
    return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, each checked: `event` and `id` lines repeat what the data says; comments are left out.

    An error is none of the response's own events: it has the number of the one before it, and no id.
    """
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    *frames, rest = without_comments(answer.text).split("\n\n")
    assert rest == ""
    for frame in frames:
        *lines, data_line = frame.split("\n")
        event = json.loads(data_line.removeprefix("data: "))
        id_lines = [] if event["type"] == "error" else [f"id: {event['sequence_number']}"]
        assert lines == [*id_lines, f"event: {event['type']}"]
        events.append(event)
    return events


async def stream(server: Gateway, text: str = "hello", /, **body: Any) -> list[dict[str, Any]]:
    return events_of(await server.client.post(PATH, json={"input": text, "stream": True, **body}))


async def read_stream(server: Gateway, response_id: str, **query: Any) -> list[dict[str, Any]]:
    return events_of(await server.client.get(f"{PATH}/{response_id}", params={"stream": True, **query}))
