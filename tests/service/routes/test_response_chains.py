"""Responses that go on from one another: on one session, on forks, under instructions."""

from __future__ import annotations

from typing import Any

from service.stores.sessions.key import SessionKey
from tests.support.fakes import FakeBackend
from tests.support.gateway import Gateway, error_of, gateway
from tests.support.responses import (
    PATH,
    SCRIPT,
    counts_of,
    encode,
    log_of,
    read_stream,
    respond,
    session_ids,
    stream,
    text_of,
)
from tests.support.responses import backend as backend
from tests.support.responses import server as server


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
    retained = {one.version for one in await server.services.store.list_retained(SessionKey("default", session_id))}
    assert retained
    for version, response in enumerate(chain[:-1], start=1):
        num_requests = len(backend.requests)
        branch = await respond(server, "branch", previous_response_id=response["id"])
        num_read = sum(len(request.prompt_ids) for request in backend.requests[num_requests:-1])
        assert counts_of(branch)[1] >= counts_of(response)[0]
        num_before = [counts_of(chain[one - 1])[0] for one in retained if one <= version]
        assert num_read == 0 if version in retained else num_read <= counts_of(branch)[1] - max(num_before, default=0)


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
