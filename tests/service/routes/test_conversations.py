from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.support.fakes import FakeBackend
from tests.support.gateway import Gateway, error_of, gateway
from tests.support.responses import PATH as RESPONSES
from tests.support.responses import SCRIPT, counts_of, get, log_of, read_stream, respond, session_ids, text_of
from tests.support.responses import backend as backend
from tests.support.responses import server as server
from tests.support.tenants import make_key, write_keys

PATH = "/v1/conversations"
SAID = {"role": "user", "content": "said before"}


async def converse(server: Gateway, **body: Any) -> str:
    """The id of a new conversation."""
    response = await server.client.post(PATH, json=body)
    assert response.status_code == 200, response.text
    return str(response.json()["id"])


async def items_of(server: Gateway, conversation_id: str, **query: Any) -> list[dict[str, Any]]:
    response = await server.client.get(f"{PATH}/{conversation_id}/items", params={"order": "asc", **query})
    assert response.status_code == 200, response.text
    return list(response.json()["data"])


async def texts_of(server: Gateway, conversation_id: str) -> list[str]:
    return [item["content"][0]["text"] for item in await items_of(server, conversation_id)]


async def add(server: Gateway, conversation_id: str, *texts: str) -> list[str]:
    items = [{"role": "user", "content": text} for text in texts]
    response = await server.client.post(f"{PATH}/{conversation_id}/items", json={"items": items})
    assert response.status_code == 200, response.text
    return [item["id"] for item in response.json()["data"]]


async def delete_item(server: Gateway, conversation_id: str, item_id: str) -> dict[str, Any]:
    response = await server.client.delete(f"{PATH}/{conversation_id}/items/{item_id}")
    assert response.status_code == 200, response.text
    return dict(response.json())


def encode(server: Gateway, text: str) -> tuple[int, ...]:
    return tuple(server.services.backend.tokenizer.encode(text))


async def test_the_stock_client_keeps_a_conversation() -> None:
    async with gateway(FakeBackend(SCRIPT), is_live=True) as server:
        client = server.openai
        made = await client.conversations.create(
            items=[{"type": "message", "role": "user", "content": "said before"}], metadata={"k": "v"}
        )
        assert (made.object, made.metadata) == ("conversation", {"k": "v"})
        assert await client.conversations.retrieve(made.id) == made
        changed = await client.conversations.update(made.id, metadata={"k": "w"})
        assert (changed.id, changed.created_at, changed.metadata) == (made.id, made.created_at, {"k": "w"})
        response = await client.responses.create(model="fake-nsm", input="hello", conversation=made.id)
        assert response.conversation is not None
        assert response.conversation.id == made.id
        listed = [item async for item in client.conversations.items.list(made.id, order="asc", limit=1)]
        assert [item.role for item in listed] == ["user", "user", "assistant"]  # type: ignore[union-attr]
        assert listed[-1].id == response.output[0].id
        item = await client.conversations.items.retrieve(listed[0].id or "", conversation_id=made.id)
        assert item == listed[0]
        added = await client.conversations.items.create(
            made.id, items=[{"type": "message", "role": "user", "content": "and this"}]
        )
        assert (added.object, added.has_more) == ("list", False)
        left = await client.conversations.items.delete(added.data[0].id or "", conversation_id=made.id)
        assert left.id == made.id
        deleted = await client.conversations.delete(made.id)
        assert (deleted.deleted, deleted.object) == (True, "conversation.deleted")


async def test_a_response_reads_what_the_conversation_has_and_adds_what_was_said(
    server: Gateway, backend: FakeBackend
) -> None:
    name = await converse(server, items=[SAID])
    one = await respond(server, "one", conversation=name)
    await add(server, name, "between")
    two = await respond(server, "two", conversation={"id": name})
    assert backend.requests[0].prompt_ids == (0, *encode(server, "User: said before\n\nUser: one\n\nAssistant:"))
    assert backend.requests[1].prompt_ids == encode(server, "\n\nUser: between\n\nUser: two\n\nAssistant:")
    assert counts_of(two)[1] == counts_of(one)[0] + len(encode(server, SCRIPT))
    assert await texts_of(server, name) == ["said before", "one", "It was", "between", "two", "It was"]
    assert two["conversation"] == {"id": name}
    assert len(await session_ids(server)) == 1


async def test_a_conversation_may_be_answered_without_new_input(server: Gateway, backend: FakeBackend) -> None:
    name = await converse(server, items=[SAID])
    response = await server.client.post(RESPONSES, json={"conversation": name})
    assert response.status_code == 200, response.text
    assert backend.requests[0].prompt_ids == (0, *encode(server, "User: said before\n\nAssistant:"))
    again = await server.client.post(RESPONSES, json={"conversation": name})
    assert (again.status_code, error_of(again)["param"]) == (400, "input")


async def test_instructions_are_no_part_of_a_conversation(server: Gateway, backend: FakeBackend) -> None:
    name = await converse(server)
    await respond(server, "one", conversation=name, instructions="Be brief.")
    again = await respond(server, "two", conversation=name, instructions="Be brief.")
    assert counts_of(again)[1] > 0
    free = await respond(server, "three", conversation=name)
    turns = [f"User: {word}\n\nAssistant: It was\n\n" for word in ("one", "two")]
    assert backend.requests[-1].prompt_ids[0] == 0
    tokenizer = server.services.backend.tokenizer
    assert tokenizer.decode(backend.requests[-1].prompt_ids[1:]) == "".join(turns) + "User: three\n\nAssistant:"
    assert len(await texts_of(server, name)) == 6
    await server.client.delete(f"{PATH}/{name}")
    for response in (free, again):
        await server.client.delete(f"{RESPONSES}/{response['id']}")
    assert len(await session_ids(server)) == 1  # the first response still needs it


async def test_an_unread_item_that_is_deleted_is_never_read(server: Gateway, backend: FakeBackend) -> None:
    name = await converse(server, items=[SAID])
    await respond(server, "one", conversation=name)
    (item_id, _) = await add(server, name, "regretted", "kept")
    await delete_item(server, name, item_id)
    await respond(server, "two", conversation=name)
    assert backend.requests[1].prompt_ids == encode(server, "\n\nUser: kept\n\nUser: two\n\nAssistant:")


async def test_when_a_read_item_is_deleted_the_rest_is_read_again(server: Gateway, backend: FakeBackend) -> None:
    name = await converse(server, items=[SAID])
    one = await respond(server, "one", conversation=name)
    await delete_item(server, name, (await items_of(server, name))[0]["id"])
    two = await respond(server, "two", conversation=name)
    text = "User: one\n\nAssistant: It was\n\nUser: two\n\nAssistant:"
    assert backend.requests[1].prompt_ids == (0, *encode(server, text))
    assert counts_of(two)[1] == 0
    three = await respond(server, "three", conversation=name)
    assert counts_of(three)[1] > 0
    assert await texts_of(server, name) == ["one", "It was", "two", "It was", "three", "It was"]
    assert len(await session_ids(server)) == 2  # the first response still has its own
    await server.client.delete(f"{RESPONSES}/{one['id']}")
    assert len(await session_ids(server)) == 1


async def test_P6_a_conversation_in_which_a_response_runs_is_busy() -> None:
    backend = FakeBackend(SCRIPT, hold=True)
    async with gateway(backend) as server:
        name = await converse(server)
        running = await respond(server, "one", conversation=name, background=True)
        for body in ({}, {"instructions": "Be brief."}):
            answer = await server.client.post(RESPONSES, json={"input": "x", "conversation": name, **body})
            assert (answer.status_code, error_of(answer)["code"]) == (409, "session_busy")
            assert int(answer.headers["retry-after"]) >= 1
        assert await texts_of(server, name) == []
        backend.release_all()
        await read_stream(server, running["id"])
        assert counts_of(await respond(server, "two", conversation=name))[1] > 0
        assert await texts_of(server, name) == ["one", "It was", "two", "It was"]


async def test_what_is_added_while_a_response_runs_comes_after_it() -> None:
    backend = FakeBackend(SCRIPT, hold=True)
    async with gateway(backend) as server:
        name = await converse(server, items=[SAID])
        running = await respond(server, "one", conversation=name, background=True)
        await add(server, name, "meanwhile")
        backend.release_all()
        await read_stream(server, running["id"])
        assert await texts_of(server, name) == ["said before", "one", "It was", "meanwhile"]
        await respond(server, "two", conversation=name)
        assert backend.requests[1].prompt_ids == encode(server, "\n\nUser: meanwhile\n\nUser: two\n\nAssistant:")


async def test_what_is_deleted_while_a_response_reads_it_is_not_in_the_next_one() -> None:
    backend = FakeBackend(SCRIPT, hold=True)
    async with gateway(backend) as server:
        name = await converse(server, items=[SAID])
        running = await respond(server, "one", conversation=name, background=True)
        await delete_item(server, name, (await items_of(server, name))[0]["id"])
        backend.release_all()
        await read_stream(server, running["id"])
        assert await texts_of(server, name) == ["one", "It was"]
        await respond(server, "two", conversation=name)
        text = "User: one\n\nAssistant: It was\n\nUser: two\n\nAssistant:"
        assert backend.requests[1].prompt_ids == (0, *encode(server, text))


@pytest.mark.parametrize("ending", ["cancel", "delete"])
async def test_a_response_that_is_stopped_leaves_the_conversation_as_it_was(ending: str) -> None:
    backend = FakeBackend(SCRIPT, hold=True)
    async with gateway(backend) as server:
        name = await converse(server, items=[SAID])
        running = await respond(server, "one", conversation=name, background=True)
        if ending == "cancel":
            await server.client.post(f"{RESPONSES}/{running['id']}/cancel")
        else:
            await server.client.delete(f"{RESPONSES}/{running['id']}")
        assert await texts_of(server, name) == ["said before"]
        backend.release_all()
        await respond(server, "two", conversation=name)
        assert await texts_of(server, name) == ["said before", "two", "It was"]


async def test_a_conversation_that_is_deleted_while_a_response_runs_stays_deleted() -> None:
    backend = FakeBackend(SCRIPT, hold=True)
    async with gateway(backend) as server:
        name = await converse(server)
        running = await respond(server, "one", conversation=name, background=True)
        await server.client.delete(f"{PATH}/{name}")
        backend.release_all()
        await read_stream(server, running["id"])
        assert (await get(server, running["id"]))["status"] == "completed"
        assert (await server.client.get(f"{PATH}/{name}")).status_code == 404
        await server.client.delete(f"{RESPONSES}/{running['id']}")
        assert await session_ids(server) == []


async def test_items_are_the_truth_when_the_session_is_deleted(server: Gateway, backend: FakeBackend) -> None:
    name = await converse(server, items=[SAID])
    await respond(server, "one", conversation=name)
    (session_id,) = await session_ids(server)
    await server.client.delete(f"/v1/sessions/{session_id}")
    await respond(server, "two", conversation=name)
    text = "User: said before\n\nUser: one\n\nAssistant: It was\n\nUser: two\n\nAssistant:"
    assert backend.requests[1].prompt_ids == (0, *encode(server, text))


async def test_a_response_of_a_conversation_may_be_continued_beside_it(server: Gateway) -> None:
    name = await converse(server)
    one = await respond(server, "one", conversation=name)
    aside = await respond(server, "aside", previous_response_id=one["id"])
    assert counts_of(aside)[1] > 0
    await respond(server, "two", conversation=name)
    assert await texts_of(server, name) == ["one", "It was", "two", "It was"]
    (forked, own) = await session_ids(server)
    said = encode(server, SCRIPT)
    start = (0, *encode(server, "User: one\n\nAssistant:"), *said)
    assert await log_of(server, own) == (*start, *encode(server, "\n\nUser: two\n\nAssistant:"), *said)
    assert await log_of(server, forked) == (*start, *encode(server, "\n\nUser: aside\n\nAssistant:"), *said)


async def test_a_conversation_leaves_its_responses_when_it_is_deleted(server: Gateway) -> None:
    name = await converse(server, items=[SAID])
    one = await respond(server, "one", conversation=name)
    assert (await server.client.delete(f"{PATH}/{name}")).json() == {
        "id": name, "object": "conversation.deleted", "deleted": True
    }  # fmt: skip
    for method, suffix in (("GET", ""), ("DELETE", ""), ("GET", "/items")):
        missing = await server.client.request(method, f"{PATH}/{name}{suffix}")
        assert (missing.status_code, error_of(missing)["code"]) == (404, "conversation_not_found")
    assert text_of(await get(server, one["id"])) == "It was"
    assert counts_of(await respond(server, previous_response_id=one["id"]))[1] > 0


async def test_items_are_listed_in_pages(server: Gateway) -> None:
    name = await converse(server)
    ids = await add(server, name, "0", "1", "2")
    newest = (await server.client.get(f"{PATH}/{name}/items", params={"limit": 2})).json()
    assert [item["id"] for item in newest["data"]] == [ids[2], ids[1]]
    assert (newest["first_id"], newest["last_id"], newest["has_more"]) == (ids[2], ids[1], True)
    rest = (await server.client.get(f"{PATH}/{name}/items", params={"after": ids[1]})).json()
    assert ([item["id"] for item in rest["data"]], rest["has_more"]) == ([ids[0]], False)
    for path in (f"{PATH}/{name}/items?after=x", f"{PATH}/{name}/items/x"):
        missing = await server.client.get(path)
        assert (missing.status_code, error_of(missing)["code"]) == (404, "item_not_found")
    assert await items_of(server, await converse(server)) == []


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"items": [SAID] * 21}, "items", ["items must have at most 20 entries, got 21"]),
        ({"items": [{"type": "function_call_output", "output": "x"}]}, "items[0].call_id", ["is required"]),
        ({"items": [{"type": "reasoning"}]}, "items[0].type", ["reasoning"]),
        ({"items": [SAID, {"type": ["message"]}]}, "items[1].type", ["one of", '["message"]']),
        ({"items": [{"role": "user", "content": [{"type": "input_image"}]}]}, "items[0].content", ["input_image"]),
        ({"items": "x"}, "items", ["list"]),
        ({"metadata": {"k": 5}}, "metadata.k", ["string", "5"]),
        ({"names": []}, "names", ["unknown"]),
    ],
)
async def test_a_bad_body_is_refused_by_name(
    server: Gateway, body: dict[str, Any], param: str, words: list[str]
) -> None:
    response = await server.client.post(PATH, json=body)
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, param)
    assert all(word in error["message"] for word in words), error["message"]


async def test_many_at_once_add_each_of_their_items(server: Gateway) -> None:
    name = await converse(server)
    await asyncio.gather(*(add(server, name, str(number)) for number in range(8)))
    assert sorted(await texts_of(server, name)) == [str(number) for number in range(8)]


async def test_L6_a_conversation_of_another_tenant_does_not_exist(tmp_path: Path) -> None:
    ours, theirs = make_key("ours"), make_key("theirs")
    path = write_keys(tmp_path / "keys.toml", ours, theirs, ours="", theirs="")
    async with gateway(FakeBackend(SCRIPT), api_keys_file=path) as server:
        made = (await server.client.post(PATH, json={"items": [SAID]}, headers=ours.headers)).json()["id"]
        body = {"input": "x", "conversation": made}
        answer = await server.client.post(RESPONSES, json=body, headers=theirs.headers)
        assert (answer.status_code, error_of(answer)["param"]) == (404, "conversation")
        for method, suffix, sent in (("GET", "", None), ("DELETE", "", None), ("POST", "", {"metadata": {}}),
                                     ("GET", "/items", None), ("POST", "/items", {"items": [SAID]})):  # fmt: skip
            answer = await server.client.request(method, f"{PATH}/{made}{suffix}", json=sent, headers=theirs.headers)
            assert answer.status_code == 404
        assert (await server.client.get(f"{PATH}/{made}", headers=ours.headers)).status_code == 200
