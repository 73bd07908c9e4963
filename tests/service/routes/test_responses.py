from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from nsm_core.errors import Overloaded
from tests.fakes import DEFAULT_SCRIPT, FakeBackend
from tests.gateway import Gateway, error_of, gateway
from tests.responses import (
    FIRST_EVENTS,
    LAST_EVENTS,
    PATH,
    counts_of,
    events_of,
    get,
    log_of,
    read_stream,
    respond,
    session_ids,
    stream,
    text_of,
)
from tests.tenants import make_key, write_keys

SCRIPT = " It was"


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend(SCRIPT)


@pytest.fixture
async def server(backend: FakeBackend) -> AsyncIterator[Gateway]:
    async with gateway(backend) as opened:
        yield opened


def encode(server: Gateway, text: str) -> tuple[int, ...]:
    return tuple(server.services.backend.tokenizer.encode(text))


async def test_the_stock_client_gets_a_response_streams_one_and_reads_both_again() -> None:
    async with gateway(FakeBackend(" " + DEFAULT_SCRIPT), is_live=True) as server:
        client = server.openai.responses
        whole = await client.create(model="fake-nsm", input="hello", metadata={"k": "v"}, user="somebody")
        async with client.stream(model="fake-nsm", input="hello") as opened:
            events = [event async for event in opened]
            streamed = await opened.get_final_response()
        again = await client.retrieve(whole.id)
        items = await client.input_items.list(whole.id)
        count = await client.input_tokens.count(model="fake-nsm", input="hello")
    assert (whole.object, whole.status, whole.output_text, whole.error) == (
        "response",
        "completed",
        DEFAULT_SCRIPT,
        None,
    )
    assert whole.id.startswith("resp_")
    assert whole.metadata == {"k": "v"}
    assert whole.incomplete_details is None
    assert whole.completed_at is not None
    assert again == whole
    assert streamed.output_text == DEFAULT_SCRIPT
    assert streamed.usage == whole.usage
    assert [event.type for event in events if event.type != "response.output_text.delta"] == [
        *FIRST_EVENTS,
        *LAST_EVENTS,
        "response.completed",
    ]
    assert [(item.type, item.role) for item in items.data] == [("message", "user")]  # type: ignore[union-attr]
    assert whole.usage is not None
    assert count.input_tokens == whole.usage.input_tokens


async def test_S9_the_events_of_a_stream_are_numbered_and_agree_with_the_whole(server: Gateway) -> None:
    events = await stream(server)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    ended = events[-1]["response"]
    num_tokens = ended["usage"]["output_tokens"]
    types = [*FIRST_EVENTS, *["response.output_text.delta"] * num_tokens, *LAST_EVENTS, "response.completed"]
    assert [event["type"] for event in events] == types
    (item,) = ended["output"]
    assert {event["item_id"] for event in deltas} == {item["id"]}
    assert "".join(event["delta"] for event in deltas) == "It was" == text_of(ended)
    assert events[-4]["text"] == "It was"
    assert (events[-3]["part"], events[-2]["item"]) == (item["content"][0], item)
    opened = events[0]["response"]
    assert (opened["status"], opened["output"], opened["usage"]) == ("in_progress", [], None)
    assert await get(server, ended["id"]) == ended


async def test_P12_a_chain_lives_on_one_session_and_reads_only_what_is_new(server: Gateway) -> None:
    response, ids, resumed = await respond(server), [], 0
    for _ in range(5):
        ids.append(response["id"])
        response = await respond(server, "again", previous_response_id=response["id"])
        num_input, num_cached = counts_of(response)
        assert num_cached > resumed
        assert num_input - num_cached == len(encode(server, "\n\nUser: again\n\nAssistant:"))
        assert response["previous_response_id"] == ids[-1]
        resumed = num_cached
    (session_id,) = await session_ids(server)
    one_turn = encode(server, "\n\nUser: again\n\nAssistant:") + encode(server, SCRIPT)
    first = (0, *encode(server, "User: hello\n\nAssistant:"), *encode(server, SCRIPT))
    assert await log_of(server, session_id) == first + one_turn * 5


async def test_P5_an_id_that_is_used_twice_forks(server: Gateway) -> None:
    root = await respond(server)
    one = await respond(server, "one", previous_response_id=root["id"])
    two = await respond(server, "two", previous_response_id=root["id"])
    more = await respond(server, "more", previous_response_id=one["id"])
    more_of_two = await respond(server, "more", previous_response_id=two["id"])
    first, second = reversed(await session_ids(server))
    say = {word: encode(server, f"\n\nUser: {word}\n\nAssistant:" + SCRIPT) for word in ("one", "two", "more")}
    start = (0, *encode(server, "User: hello\n\nAssistant:"), *encode(server, SCRIPT))
    assert await log_of(server, first) == start + say["one"] + say["more"]
    assert await log_of(server, second) == start + say["two"] + say["more"]
    assert counts_of(more)[1] == len(start + say["one"])
    assert counts_of(more_of_two)[1] == len(start + say["two"])


async def test_P12_a_fork_of_an_older_response_begins_at_the_snapshot_before_it(
    server: Gateway, backend: FakeBackend
) -> None:
    chain = [await respond(server, "long " * 200)]
    for _ in range(5):
        chain.append(await respond(server, "long " * 200, previous_response_id=chain[-1]["id"]))
    (session_id,) = await session_ids(server)
    kept = {one.version for one in await server.services.store.list_kept(tenant="default", session_id=session_id)}
    assert kept
    for version, response in enumerate(chain[:-1], start=1):
        num_requests = len(backend.requests)
        branch = await respond(server, "branch", previous_response_id=response["id"])
        num_read = sum(len(request.prompt_ids) for request in backend.requests[num_requests:-1])
        assert counts_of(branch)[1] >= counts_of(response)[0]
        num_before = [counts_of(chain[one - 1])[0] for one in kept if one <= version]
        assert num_read == 0 if version in kept else num_read <= counts_of(branch)[1] - max(num_before, default=0)


async def test_P5_two_at_once_on_one_parent_are_two_branches() -> None:
    backend = FakeBackend(SCRIPT, hold=True)
    backend.release(2)
    async with gateway(backend) as server:
        root = await respond(server, max_output_tokens=2)
        posts = [
            await respond(server, word, previous_response_id=root["id"], background=True) for word in ("one", "two")
        ]
        assert len(backend.running) == len(await session_ids(server)) == 2
        backend.release_all()
        for post in posts:
            (*_, last) = await read_stream(server, post["id"])
            assert text_of(last["response"]) == "It was"
            assert counts_of(last["response"])[1] > 0
        assert (await respond(server, previous_response_id=posts[1]["id"]))["status"] == "completed"


async def test_instructions_are_read_by_their_own_turn_alone(server: Gateway, backend: FakeBackend) -> None:
    root = await respond(server)
    ruled = await respond(server, "one", previous_response_id=root["id"], instructions="Be brief.")
    free = await respond(server, "two", previous_response_id=ruled["id"])
    hello = encode(server, "User: hello\n\nAssistant:") + encode(server, SCRIPT)
    one = encode(server, "\n\nUser: one\n\nAssistant:")
    two = encode(server, "\n\nUser: two\n\nAssistant:")
    said = encode(server, SCRIPT)
    assert backend.requests[1].prompt_ids == (0, *encode(server, "Be brief.\n\n"), *hello, *one)
    assert counts_of(ruled)[1] == 0
    assert backend.requests[2].prompt_ids == (*one, *said, *two)
    assert counts_of(free)[1] == len(hello) + 1
    assert ruled["instructions"] == "Be brief."
    assert free["instructions"] is None
    plain = (await session_ids(server))[-1]
    assert await log_of(server, plain) == (0, *hello, *one, *said, *two, *said)


async def test_the_same_instructions_again_resume_what_was_read_under_them(
    server: Gateway, backend: FakeBackend
) -> None:
    one = await respond(server, "one", instructions="Be brief.")
    two = await respond(server, "two", previous_response_id=one["id"], instructions="Be brief.")
    other = await respond(server, "three", previous_response_id=two["id"], instructions="Rhyme.")
    free = await respond(server, "four", previous_response_id=other["id"])
    read = [encode(server, f"{start}User: {word}\n\nAssistant:" + SCRIPT)
            for start, word in (("", "one"), ("\n\n", "two"), ("\n\n", "three"), ("\n\n", "four"))]  # fmt: skip
    assert backend.requests[1].prompt_ids == encode(server, "\n\nUser: two\n\nAssistant:")
    assert counts_of(two)[1] > 0
    assert counts_of(other) == (len(encode(server, "Rhyme.\n\n")) + 1 + sum(map(len, read[:3])) - 3, 0)
    (session_id, *_) = await session_ids(server)
    assert await log_of(server, session_id) == (0, *read[0], *read[1], *read[2], *read[3])
    assert counts_of(free)[1] == 0


async def test_P4_what_is_not_stored_leaves_nothing_behind(server: Gateway) -> None:
    free = await respond(server, store=False)
    assert (free["store"], text_of(free)) == (False, "It was")
    assert await session_ids(server) == []
    assert (await server.client.get(f"{PATH}/{free['id']}")).status_code == 404
    root = await respond(server)
    (session_id,) = await session_ids(server)
    log = await log_of(server, session_id)
    for _ in range(2):
        aside = await respond(server, "aside", previous_response_id=root["id"], store=False)
        assert counts_of(aside)[1] == len(log)
    events = await stream(server, "aside", previous_response_id=root["id"], store=False)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert text_of(events[-1]["response"]) == "It was"
    assert await session_ids(server) == [session_id]
    assert await log_of(server, session_id) == log
    await respond(server, previous_response_id=root["id"])
    old = await respond(server, "aside", previous_response_id=root["id"], store=False)  # now from the log
    assert counts_of(old) == (counts_of(aside)[0], 0)


async def test_a_session_goes_with_the_last_response_that_needs_it(server: Gateway) -> None:
    one = await respond(server)
    two = await respond(server, previous_response_id=one["id"])
    answer = await server.client.delete(f"{PATH}/{one['id']}")
    assert answer.json() == {"id": one["id"], "object": "response", "deleted": True}
    missing = await server.client.get(f"{PATH}/{one['id']}")
    assert (missing.status_code, error_of(missing)["code"]) == (404, "response_not_found")
    three = await respond(server, previous_response_id=two["id"], instructions="Be brief.")
    for response in (two, three):
        assert len(await session_ids(server)) > 0
        await server.client.delete(f"{PATH}/{response['id']}")
    assert await session_ids(server) == []
    assert (await server.client.delete(f"{PATH}/{two['id']}")).status_code == 404


async def test_P9_what_cannot_be_continued_is_named(server: Gateway) -> None:
    async def refusal(response_id: str) -> tuple[int, dict[str, Any]]:
        answer = await server.client.post(PATH, json={"input": "x", "previous_response_id": response_id})
        return answer.status_code, error_of(answer)

    status, error = await refusal("resp_unknown")
    assert (status, error["code"], error["param"]) == (404, "previous_response_not_found", "previous_response_id")
    assert "resp_unknown" in error["message"]
    root = await respond(server)
    (session_id,) = await session_ids(server)
    await server.client.delete(f"/v1/sessions/{session_id}")
    status, error = await refusal(root["id"])
    assert (status, error["code"]) == (404, "previous_response_not_found")
    assert "deleted" in error["message"]


async def test_a_session_that_went_on_by_itself_is_forked(server: Gateway) -> None:
    root = await respond(server)
    (session_id,) = await session_ids(server)
    log = await log_of(server, session_id)
    await server.client.post(f"/v1/sessions/{session_id}/generate", json={"input": "aside", "max_tokens": 2})
    await respond(server, "next", previous_response_id=root["id"])
    assert (await log_of(server, (await session_ids(server))[0]))[: len(log)] == log
    await server.client.post(f"/v1/sessions/{session_id}/rewind", json={"to_version": 0})
    answer = await server.client.post(PATH, json={"input": "x", "previous_response_id": root["id"]})
    assert (answer.status_code, error_of(answer)["code"]) == (404, "previous_response_not_found")


async def test_too_few_tokens_make_an_incomplete_response_that_can_be_continued(server: Gateway) -> None:
    short = await respond(server, max_output_tokens=2)
    assert (short["status"], short["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (short["output"][0]["status"], short["max_output_tokens"]) == ("incomplete", 2)
    events = await stream(server, previous_response_id=short["id"], max_output_tokens=2)
    assert events[-1]["type"] == "response.incomplete"
    assert counts_of(events[-1]["response"])[1] > 0


async def test_what_the_input_may_be(server: Gateway, backend: FakeBackend) -> None:
    root = await respond(server)
    items = [
        {"role": "system", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        *root["output"],
        {"role": "developer", "content": [{"type": "input_text", "text": "b"}, {"type": "text", "text": "c"}]},
        {"role": "user", "content": "d"},
    ]
    response = await server.client.post(PATH, json={"input": items})
    assert response.status_code == 200, response.text
    text = "Be kind.\n\nUser: a\n\nAssistant: It was\n\nb\nc\n\nUser: d\n\nAssistant:"
    assert backend.requests[-1].prompt_ids == (0, *encode(server, text))


async def test_the_input_items_are_listed_in_pages(server: Gateway) -> None:
    items = [{"role": "user", "content": str(number)} for number in range(3)]
    response = (await server.client.post(PATH, json={"input": items})).json()
    path = f"{PATH}/{response['id']}/input_items"

    async def page(**query: Any) -> tuple[list[str], bool]:
        body = (await server.client.get(path, params=query)).json()
        assert body["object"] == "list"
        assert (body["first_id"], body["last_id"]) == (body["data"][0]["id"], body["data"][-1]["id"])
        return [item["content"][0]["text"] for item in body["data"]], body["has_more"]

    assert await page() == (["2", "1", "0"], False)
    assert await page(order="asc", limit=2) == (["0", "1"], True)
    last = (await server.client.get(path, params={"order": "asc", "limit": 2})).json()["last_id"]
    assert await page(order="asc", after=last) == (["2"], False)
    for query in ({"limit": 0}, {"order": "up"}):
        assert (await server.client.get(path, params=query)).status_code == 400
    missing = await server.client.get(path, params={"after": "msg_unknown"})
    assert (missing.status_code, error_of(missing)["param"]) == (404, "after")


BAD: list[tuple[dict[str, Any], str, list[str]]] = [
    ({"input": 5}, "input", ["string or a list", "5"]),
    ({"input": []}, "input", ["at least 1"]),
    ({"input": [{"role": "user", "content": 5}]}, "input[0].content", ["string", "5"]),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", ["tool"]),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].type", ["message", "function_call"]),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", ["item_reference"]),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content",
        ["input_image"],
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]},
        "input[0].content",
        ["input_file"],
    ),
    ({"tools": [{"type": "function"}]}, "tools", ["not supported"]),
    ({"reasoning": {"effort": "high"}}, "reasoning", ["not supported"]),
    ({"include": ["message.output_text.logprobs"]}, "include", ["not supported"]),
    ({"top_logprobs": 3}, "top_logprobs", ["not supported"]),
    ({"text": {"format": {"type": "json_object"}}}, "text", ["json_object"]),
    ({"truncation": "middle"}, "truncation", ["middle"]),
    ({"max_output_tokens": 0}, "max_output_tokens", ["[1, 32768]", "0"]),
    ({"max_tokens": 5}, "max_tokens", ["not supported"]),
    ({"temperature": 3}, "temperature", ["[0, 2]", "3"]),
    ({"metadata": {str(number): "x" for number in range(17)}}, "metadata", ["16", "17"]),
    ({"stop": ["x"] * 15}, "stop", ["14", "15"]),
    ({"previous_response_id": "r", "conversation": "c"}, "conversation", ["previous_response_id"]),
    ({"conversation": 5}, "conversation", ["id", "5"]),
    ({"conversation": "conv_unknown", "store": False}, "conversation", ["store"]),
    ({"background": True, "store": False}, "background", ["store"]),
    ({"model": "other"}, "model", ["other"]),
    ({"instruction": "x"}, "instruction", ["did you mean instructions?"]),
]


@pytest.mark.parametrize(("body", "param", "words"), BAD, ids=[f"{param}-{n}" for n, (_, param, _) in enumerate(BAD)])
async def test_P10_what_cannot_be_done_is_refused_by_name(
    server: Gateway, body: dict[str, Any], param: str, words: list[str]
) -> None:
    response = await server.client.post(PATH, json={"input": "x", **body})
    error = error_of(response)
    assert response.status_code == (404 if param == "model" else 400)
    assert error["param"] == param
    assert all(word in error["message"] for word in words), error["message"]
    assert await session_ids(server) == []


async def test_what_wishes_for_nothing_is_accepted(server: Gateway) -> None:
    body = {
        "tools": [], "tool_choice": "auto", "include": [], "reasoning": {"effort": "none"}, "top_logprobs": 0,
        "text": {"format": {"type": "text"}}, "truncation": "auto", "parallel_tool_calls": True, "user": "u",
        "safety_identifier": "s", "prompt_cache_key": "k", "service_tier": "auto", "max_tool_calls": 3,
    }  # fmt: skip
    assert (await respond(server, **body))["truncation"] == "auto"


async def test_a_response_in_the_background_is_polled() -> None:
    backend = FakeBackend(SCRIPT, hold=True)
    async with gateway(backend) as server:
        opened = await respond(server, background=True)
        assert (opened["status"], opened["background"], opened["output"]) == ("in_progress", True, [])
        assert (await get(server, opened["id"]))["status"] == "in_progress"
        answer = await server.client.post(PATH, json={"input": "x", "previous_response_id": opened["id"]})
        assert (answer.status_code, error_of(answer)["code"]) == (409, "session_busy")
        reading = asyncio.create_task(read_stream(server, opened["id"]))
        await backend.held.wait()
        backend.release_all()
        events = await reading
        ended = await get(server, opened["id"])
        assert (ended["status"], text_of(ended)) == ("completed", "It was")
        assert events[-1]["response"] == ended
        assert events == await read_stream(server, opened["id"])


async def test_a_running_response_is_cancelled() -> None:
    backend = FakeBackend(SCRIPT, hold=True)
    async with gateway(backend) as server:
        opened = await respond(server, background=True)
        reading = asyncio.create_task(read_stream(server, opened["id"]))
        await backend.held.wait()
        cancelled = (await server.client.post(f"{PATH}/{opened['id']}/cancel")).json()
        assert (cancelled["status"], cancelled["output"], cancelled["error"]) == ("cancelled", [], None)
        events = await reading
        assert (events[-1]["type"], events[-1]["response"]) == ("response.failed", cancelled)
        assert await get(server, opened["id"]) == cancelled
        again = (await server.client.post(f"{PATH}/{opened['id']}/cancel")).json()
        assert again == cancelled
        assert backend.running == set()
        answer = await server.client.post(PATH, json={"input": "x", "previous_response_id": opened["id"]})
        assert (answer.status_code, error_of(answer)["param"]) == (400, "previous_response_id")


async def test_a_response_that_has_ended_stays_as_it_is_when_cancelled(server: Gateway) -> None:
    ended = await respond(server)
    assert (await server.client.post(f"{PATH}/{ended['id']}/cancel")).json() == ended


async def test_a_running_response_that_is_deleted_stops() -> None:
    backend = FakeBackend(SCRIPT, hold=True)
    async with gateway(backend) as server:
        opened = await respond(server, background=True)
        assert (await server.client.delete(f"{PATH}/{opened['id']}")).status_code == 200
        assert backend.running == set()
        assert await session_ids(server) == []


@pytest.mark.parametrize("after", [0, 3, 4, 6, 9, 11])
async def test_S10_a_stream_is_read_on_from_any_event(server: Gateway, after: int) -> None:
    events = await stream(server)
    response_id = events[-1]["response"]["id"]
    assert await read_stream(server, response_id, starting_after=after) == events[after + 1 :]
    answer = await server.client.get(
        f"{PATH}/{response_id}", params={"stream": True}, headers={"last-event-id": str(after)}
    )
    assert events_of(answer) == events[after + 1 :]


async def test_S10_a_client_that_leaves_comes_back_to_its_running_stream() -> None:
    backend = FakeBackend(SCRIPT, hold=True)
    async with gateway(backend, is_live=True) as server:
        body = {"input": "hello", "stream": True}
        async with server.client.stream("POST", PATH, json=body) as answer:
            lines = answer.aiter_lines()
            while not (await anext(lines)).startswith("id: 3"):
                pass
        response_id = next(iter(backend.running))._request.request_id
        reading = asyncio.create_task(read_stream(server, response_id, starting_after=3))
        backend.release_all()
        events = await reading
        assert [event["sequence_number"] for event in events] == list(range(4, 4 + len(events)))
        assert text_of(events[-1]["response"]) == "It was"


async def test_an_engine_that_fails_fails_the_response() -> None:
    async with gateway(FakeBackend(SCRIPT, fail_after=2)) as server:
        answer = await server.client.post(PATH, json={"input": "x"})
        assert answer.status_code == 500
        events = await stream(server)
        failed = events[-1]["response"]
        assert events[-1]["type"] == "response.failed"
        assert failed["status"] == "failed"
        assert failed["error"] == {"code": "server_error", "message": "the fake was told to fail"}
        assert events == await read_stream(server, failed["id"])
        free = await stream(server, store=False)
        assert (free[-1]["type"], free[-1]["response"]["status"]) == ("response.failed", "failed")


async def test_a_refused_response_leaves_nothing_behind(server: Gateway, backend: FakeBackend) -> None:
    backend.refusal = Overloaded("the queue is full")
    for body in ({}, {"background": True}, {"store": False}):
        answer = await server.client.post(PATH, json={"input": "x", **body})
        assert (answer.status_code, error_of(answer)["code"]) == (503, "overloaded")
    assert await session_ids(server) == []


async def test_a_retry_with_the_same_key_gets_the_same_response() -> None:
    backend = FakeBackend(SCRIPT, hold=True)
    async with gateway(backend) as server:
        body, headers = {"input": "x"}, {"idempotency-key": "k1"}
        posts = [asyncio.create_task(server.client.post(PATH, json=body, headers=headers)) for _ in range(2)]
        await backend.held.wait()
        backend.release_all()
        first, second = [answer.json() for answer in await asyncio.gather(*posts)]
        assert first == second
        third = await server.client.post(PATH, json={**body, "stream": True}, headers=headers)
        assert events_of(third)[-1]["response"] == first
        assert len(await session_ids(server)) == 1
        other = await server.client.post(PATH, json={"input": "y"}, headers=headers)
        assert (other.status_code, error_of(other)["code"]) == (422, "idempotency_key_reused")
        bad = await server.client.post(PATH, json=body, headers={"idempotency-key": "a b"})
        assert (bad.status_code, error_of(bad)["param"]) == (400, "Idempotency-Key")


async def test_a_retry_of_a_failed_response_runs_again() -> None:
    backend = FakeBackend(SCRIPT, fail_after=1)
    async with gateway(backend) as server:
        body, headers = {"input": "x"}, {"idempotency-key": "k1"}
        assert (await server.client.post(PATH, json=body, headers=headers)).status_code == 500
        backend.fail_after = None
        again = (await server.client.post(PATH, json=body, headers=headers)).json()
        assert (again["status"], text_of(again)) == ("completed", "It was")
        body, headers = {"input": "y", "previous_response_id": again["id"]}, {"idempotency-key": "k2"}
        backend.fail_after = 1
        assert (await server.client.post(PATH, json=body, headers=headers)).status_code == 500
        backend.fail_after = None
        more = (await server.client.post(PATH, json=body, headers=headers)).json()
        assert (more["status"], text_of(more)) == ("completed", "It was")
        assert await read_stream(server, more["id"]) != []
        for response in (again, more):
            await server.client.delete(f"{PATH}/{response['id']}")
        assert await session_ids(server) == []


async def test_L6_a_response_of_another_tenant_does_not_exist(tmp_path: Path) -> None:
    ours, theirs = make_key("ours"), make_key("theirs")
    path = write_keys(tmp_path / "keys.toml", ours, theirs, ours="", theirs="")
    async with gateway(FakeBackend(SCRIPT), api_keys_file=path) as server:

        async def ask(key: Any, method: str, route: str, body: Any = None) -> tuple[int, str]:
            answer = await server.client.request(method, PATH + route, json=body, headers=key.headers)
            return answer.status_code, answer.text

        made = await server.client.post(PATH, json={"input": "secret"}, headers=ours.headers)
        response_id = made.json()["id"]
        calls = [("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items"), ("GET", "?stream=true")]
        for method, suffix in calls:
            status, text = await ask(theirs, method, f"/{response_id}{suffix}")
            unknown = await ask(theirs, method, f"/resp_x{suffix}")
            assert (status, text.replace(response_id, "resp_x")) == unknown
            assert status == 404
        body = {"input": "x", "previous_response_id": response_id}
        assert (await ask(theirs, "POST", "", body))[0] == 404
        assert (await ask(ours, "POST", "", body))[0] == 200


async def test_the_quota_of_sessions_holds_for_responses(tmp_path: Path) -> None:
    key = make_key("ours")
    path = write_keys(tmp_path / "keys.toml", key, ours="max_sessions = 1")
    async with gateway(FakeBackend(SCRIPT), api_keys_file=path) as server:
        first = await server.client.post(PATH, json={"input": "x"}, headers=key.headers)
        more = {"input": "y", "previous_response_id": first.json()["id"]}
        assert (await server.client.post(PATH, json=more, headers=key.headers)).status_code == 200
        second = await server.client.post(PATH, json={"input": "x"}, headers=key.headers)
        assert (second.status_code, error_of(second)["code"]) == (429, "quota_exceeded")


async def test_the_stock_client_sees_errors_as_its_own() -> None:
    async with gateway(FakeBackend(SCRIPT), is_live=True) as server:
        with pytest.raises(openai.NotFoundError, match="resp_unknown"):
            await server.openai.responses.retrieve("resp_unknown")
        with pytest.raises(openai.BadRequestError, match="not supported"):
            await server.openai.responses.create(
                model="fake-nsm", input="x", tools=[{"type": "web_search"}]
            )  # fmt: skip
