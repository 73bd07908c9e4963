"""/v1/states and the requests that start from them, on the fake: its state tells every wrong or lost token."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from nsm_core.chat_template import ChatMessage
from nsm_core.tokenizer import BpeTokenizer
from service.schemas.chat import Message, core_messages
from service.stores.sessions.key import SessionKey
from service.stores.sessions.sqlite import SqliteSessionStore
from service.stores.states.base import PUBLISHED
from service.stores.states.factory import states_beside
from service.transfer.session_file import read_file
from tests.support.fakes import FakeBackend, state_after, tiny_tokenizer
from tests.support.gateway import FILE_HEADERS, Gateway, error_of, frames_of, gateway
from tests.support.responses import events_of
from tests.support.tenants import make_key, write_keys

RULES = "Answer briefly."


@pytest.fixture
async def server() -> AsyncIterator[Gateway]:
    async with gateway(FakeBackend()) as made:
        yield made


async def create(server: Gateway, name: str = "rules", **fields: Any) -> dict[str, Any]:
    body = {"name": name, **(fields or {"text": RULES})}
    response = await server.client.post("/v1/states", json=body)
    assert response.status_code == 200, response.text
    return dict(response.json())


async def post(server: Gateway, path: str, **body: Any) -> httpx.Response:
    return await server.client.post(path, json=body)


async def complete(server: Gateway, **body: Any) -> dict[str, Any]:
    response = await post(server, "/v1/completions", **{"prompt": " Hi", "max_tokens": 3, **body})
    assert response.status_code == 200, response.text
    return dict(response.json())


def ids_of(text: str) -> tuple[int, ...]:
    return (tiny_tokenizer().end_of_text_id, *tiny_tokenizer().encode(text))


async def state_of(server: Gateway, data: str) -> bytes:
    """The model's state in a returned one."""
    snapshot = read_file(base64.b64decode(data)).snapshot
    assert snapshot is not None
    return snapshot.state


async def test_a_state_from_a_text_is_listed_shown_and_deleted(server: Gateway) -> None:
    made = await create(server, text=RULES, metadata={"team": "a"})
    num_tokens = len(ids_of(RULES))
    assert (made["id"], made["object"], made["source"], made["published"]) == ("rules@1", "state", "text", False)
    assert (made["position"], made["num_tokens"], made["metadata"]) == (num_tokens - 1, num_tokens, {"team": "a"})
    again = await create(server)
    assert again["id"] == "rules@2"
    listed = (await server.client.get("/v1/states")).json()
    assert [state["id"] for state in listed["data"]] == ["rules@2", "rules@1"]
    assert (await server.client.get("/v1/states/rules")).json() == again
    assert (await server.client.get("/v1/states/rules@1")).json() == made
    deleted = await server.client.delete("/v1/states/rules@1")
    assert deleted.json() == {"id": "rules@1", "object": "state.deleted", "deleted": True}
    missing = await server.client.get("/v1/states/rules@1")
    assert (missing.status_code, error_of(missing)["code"]) == (404, "state_not_found")
    assert (await server.client.delete("/v1/states/rules")).status_code == 200
    assert (await server.client.get("/v1/states")).json()["data"] == []


async def test_a_completion_from_a_state_reads_only_its_own_prompt(server: Gateway) -> None:
    made = await create(server)
    answer = await complete(server, state="rules")
    prompt_tokens = made["num_tokens"] + len(tiny_tokenizer().encode(" Hi"))
    assert answer["usage"]["prompt_tokens"] == prompt_tokens
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": made["position"]}
    several = await complete(server, state="rules@1", prompt=[" Hi", " Ho"], n=2)
    assert len(several["choices"]) == 4
    assert several["usage"]["prompt_tokens_details"] == {"cached_tokens": 2 * made["position"]}


async def test_an_echo_after_a_state_scores_its_first_token_too(server: Gateway) -> None:
    await create(server)
    whole = await complete(server, prompt=RULES + " Hi", echo=True, logprobs=2, max_tokens=0)
    after = await complete(server, state="rules", prompt=" Hi", echo=True, logprobs=2, max_tokens=0)
    num_own = len(tiny_tokenizer().encode(" Hi"))
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        own = after["choices"][0]["logprobs"][name]
        assert own == whole["choices"][0]["logprobs"][name][-num_own:]
        assert None not in own


async def test_a_state_is_answered_as_it_is_without_a_prompt(server: Gateway) -> None:
    await create(server)
    whole = await complete(server, prompt=RULES, seed=1)
    after = await complete(server, state="rules", prompt="", seed=1)
    assert after["choices"] == whole["choices"]
    assert after["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]


async def test_the_end_state_is_that_of_one_run_over_all_tokens(server: Gateway) -> None:
    """Text, then prompt and answer from its state, then more from the returned state, as one run over all ids."""
    await create(server)
    first = await complete(server, state="rules", return_state=True)
    returned = first["state"]
    assert returned["object"] == "state"
    second = await complete(server, state=returned["data"], prompt=" and", return_state=True)
    file = read_file(base64.b64decode(second["state"]["data"]))
    text = RULES + " Hi" + first["choices"][0]["text"] + " and" + second["choices"][0]["text"]
    assert tiny_tokenizer().decode(file.log_ids[1:]) == text
    fed = file.log_ids[: second["state"]["position"]]
    assert await state_of(server, second["state"]["data"]) == state_after(fed)
    assert second["usage"]["prompt_tokens_details"] == {"cached_tokens": returned["position"]}
    plain = await complete(server, prompt="Once", return_state=True, cache_prompt=True)
    fed = read_file(base64.b64decode(plain["state"]["data"])).log_ids[: plain["state"]["position"]]
    assert await state_of(server, plain["state"]["data"]) == state_after(fed)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_stream_brings_the_state_before_the_usage(server: Gateway, path: str) -> None:
    body: dict[str, Any] = {"prompt": "Hi"} if path == "/v1/completions" else {"messages": [MESSAGE]}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    frames = frames_of((await post(server, path, **body, max_tokens=3, return_state=True, **options)).text)
    assert [frame["choices"] for frame in frames[-2:]] == [[], []]
    assert frames[-2]["usage"] is None
    assert frames[-2]["state"]["object"] == "state"
    assert frames[-1]["usage"]["completion_tokens"] == 3


MESSAGE = {"role": "user", "content": "Hi"}


async def test_a_chat_from_messages_reads_what_the_whole_chat_reads(server: Gateway) -> None:
    system = {"role": "system", "content": RULES}
    example = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two."}]
    made = await create(server, messages=[system, *example])
    path, fields = "/v1/chat/completions", {"max_tokens": 4, "return_state": True}
    whole = (await post(server, path, messages=[system, *example, MESSAGE], **fields)).json()
    started = (await post(server, path, messages=[MESSAGE], state="rules", **fields)).json()
    assert started["usage"]["prompt_tokens_details"] == {"cached_tokens": made["position"]}
    texts = [
        tiny_tokenizer().decode(read_file(base64.b64decode(answer["state"]["data"])).log_ids)
        for answer in (whole, started)
    ]
    assert texts[0] == texts[1]
    follow = (await post(server, path, messages=[MESSAGE], state=started["state"]["data"], **fields)).json()
    text = tiny_tokenizer().decode(read_file(base64.b64decode(follow["state"]["data"])).log_ids)
    assert text.startswith(texts[1] + "\n\nUser: Hi\n\nAssistant:")


SYSTEM = {"role": "system", "content": RULES}
ENDS = {
    "system": [SYSTEM],
    "user": [SYSTEM, {"role": "user", "content": "One?"}],
    "assistant": [SYSTEM, {"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two."}],
}


async def text_of(server: Gateway, session_id: str) -> str:
    ids = await server.store.read_log(SessionKey("default", session_id))
    return tiny_tokenizer().decode(ids[1:])


@pytest.mark.parametrize("end", ENDS)
async def test_a_sessions_messages_after_a_state_of_messages_are_separated_once(server: Gateway, end: str) -> None:
    await create(server, messages=ENDS[end])
    raw = (await server.client.get("/v1/states/rules/export")).content
    await post(server, "/v1/sessions", id="named", state="rules")
    await server.client.post("/v1/sessions/import", params={"id": "file"}, content=raw, headers=FILE_HEADERS)
    fields = {"messages": [MESSAGE], "max_tokens": 1, "temperature": 0}
    assert (await post(server, "/v1/sessions/named/generate", **fields)).status_code == 200
    forked = await post(server, "/v1/sessions/named/fork", id="fork", version=1)
    assert forked.status_code == 200, forked.text
    for name in ("file", "fork"):
        assert (await post(server, f"/v1/sessions/{name}/generate", **fields)).status_code == 200
    template = server.services.chat_template
    whole = template.render(core_messages([Message.model_validate(one) for one in (*ENDS[end], MESSAGE)], template))
    for name in ("named", "file", "fork"):
        text = await text_of(server, name)
        assert text.startswith(whole), text
    await post(server, "/v1/sessions/named/generate", **fields)
    assert (await text_of(server, "named")).count(template.render_next(ChatMessage("user", "Hi"))) == 2


async def test_a_sessions_messages_after_a_text_without_a_separator_get_one(server: Gateway) -> None:
    await create(server)
    await post(server, "/v1/sessions", id="s", state="rules")
    await post(server, "/v1/sessions/s/generate", messages=[MESSAGE], max_tokens=1)
    assert (await text_of(server, "s")).startswith(f"{RULES}\n\nUser: Hi\n\nAssistant:")


async def test_a_session_starts_from_a_state_with_its_own_seed(server: Gateway) -> None:
    made = await create(server)
    for name in ("one", "two"):
        session = (await post(server, "/v1/sessions", id=name, state="rules")).json()
        assert (session["position"], session["version"]) == (made["position"], 1)
        turn = await post(server, f"/v1/sessions/{name}/generate", input=" Hi", max_tokens=3)
        assert turn.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == made["position"]
    seeds = [(await server.store.log_marks(key))[0].seed for key in await keys_of(server)]
    assert len(set(seeds)) == 2
    assert (await post(server, "/v1/sessions", id="one", state="rules")).status_code == 409


async def keys_of(server: Gateway) -> list[Any]:
    return [head.key for head in (await server.store.list(tenant="default", limit=10)).heads]


async def test_a_state_of_a_session_at_a_position_goes_on_there(server: Gateway) -> None:
    await post(server, "/v1/sessions", id="s")
    await post(server, "/v1/sessions/s/generate", input="Once", max_tokens=4)
    newest = await create(server, "end", session={"id": "s"})
    early = await create(server, "early", session={"id": "s", "position": 3})
    assert (newest["source"], early["num_tokens"]) == ("session", 3)
    first = await complete(server, state="end", return_state=True)
    second = await complete(server, state="early", return_state=True)
    for answer in (first, second):
        file = read_file(base64.b64decode(answer["state"]["data"]))
        state = await state_of(server, answer["state"]["data"])
        assert state == state_after(file.log_ids[: answer["state"]["position"]])
    wrong = await post(server, "/v1/states", name="x", session={"id": "s", "position": 999})
    assert (wrong.status_code, error_of(wrong)["param"]) == (400, "session.position")
    assert (await post(server, "/v1/states", name="x", session={"id": "none"})).status_code == 404


async def test_a_response_begins_a_chain_from_a_state(server: Gateway) -> None:
    made = await create(server, messages=[{"role": "system", "content": RULES}])
    first = (await post(server, "/v1/responses", input="Hi", state="rules", max_output_tokens=16)).json()
    assert first["status"] in ("completed", "incomplete")
    assert first["usage"]["input_tokens_details"]["cached_tokens"] == made["position"]
    counted = (await post(server, "/v1/responses/input_tokens", input="Hi", state="rules")).json()
    assert counted["input_tokens"] == first["usage"]["input_tokens"]
    follow = await post(server, "/v1/responses", input="Ho", previous_response_id=first["id"], max_output_tokens=16)
    assert follow.status_code == 200
    unstored = await post(server, "/v1/responses", input="Hi", state="rules", store=False, max_output_tokens=16)
    assert unstored.json()["usage"]["input_tokens"] == first["usage"]["input_tokens"]
    refused = await post(server, "/v1/responses", input="Hi", state="rules", instructions="x")
    stored = await post(server, "/v1/responses", input="Hi", return_state=True)
    assert (stored.status_code, error_of(stored)["param"]) == (400, "return_state")
    assert (refused.status_code, error_of(refused)["param"]) == (400, "state")


@pytest.mark.parametrize("start", ["nothing", "a state", "a chain", "an older response"])
async def test_an_unstored_response_returns_the_state_of_one_run_over_all_tokens(server: Gateway, start: str) -> None:
    await create(server, messages=[SYSTEM])
    before: dict[str, Any] = {}
    if start == "a state":
        before = {"state": "rules"}
    elif start != "nothing":
        first = (await post(server, "/v1/responses", input="One?", max_output_tokens=16)).json()
        before = {"previous_response_id": first["id"]}
        if start == "an older response":
            await post(server, "/v1/responses", input="Two?", max_output_tokens=16, **before)
    fields: dict[str, Any] = {"store": False, "return_state": True, "max_output_tokens": 16}
    one = (await post(server, "/v1/responses", input="Hi", **before, **fields)).json()
    file = read_file(base64.b64decode(one["state"]["data"]))
    assert await state_of(server, one["state"]["data"]) == state_after(file.log_ids[: one["state"]["position"]])
    is_ended = one["status"] == "completed"  # by an end-of-text token, which no log has
    assert len(file.log_ids) == one["usage"]["input_tokens"] + one["usage"]["output_tokens"] - is_ended
    follow = await post(server, "/v1/responses", input="Ho", state=one["state"]["data"], **fields, stream=True)
    last = events_of(follow)[-1]["response"]
    text = tiny_tokenizer().decode(read_file(base64.b64decode(last["state"]["data"])).log_ids)
    assert text.startswith(tiny_tokenizer().decode(file.log_ids))
    assert "\n\nUser: Ho\n\nAssistant:" in text


async def test_a_file_goes_out_and_comes_in_again(server: Gateway) -> None:
    await create(server)
    raw = (await server.client.get("/v1/states/rules@1/export")).content
    made = await server.client.post("/v1/states/import", params={"name": "copy"}, content=raw, headers=FILE_HEADERS)
    assert made.json()["id"] == "copy@1"
    assert (await create(server, "third", file=base64.b64encode(raw).decode()))["source"] == "file"
    session = await server.client.post("/v1/sessions/import", params={"id": "s"}, content=raw, headers=FILE_HEADERS)
    assert session.json()["position"] == made.json()["position"]
    for bad in (b"", b"x" * 200, raw[:-1], bytes([*raw[:-1], raw[-1] ^ 1])):
        refused = await server.client.post(
            "/v1/states/import", params={"name": "bad"}, content=bad, headers=FILE_HEADERS
        )
        assert refused.status_code == 400


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"name": "a b", "text": "x"}, "name"),
        ({"name": "", "text": "x"}, "name"),
        ({"name": "x"}, "text"),
        ({"name": "x", "text": "x", "file": "x"}, "file"),
        ({"name": "x", "file": "no base64!"}, "file"),
        ({"name": "x", "file": "AAAA"}, "file"),
        ({"name": "x", "file": ""}, "file"),
        ({"name": "x", "text": ""}, "text"),
        ({"name": "x", "text": "x", "colour": 1}, "colour"),
        ({"name": "x", "session": {"id": "s", "version": 1, "position": 1}}, "session.position"),
    ],
)
async def test_a_body_that_makes_no_state_is_refused_by_name(
    server: Gateway, fields: dict[str, Any], param: str
) -> None:
    refused = await post(server, "/v1/states", **fields)
    assert (refused.status_code, error_of(refused)["param"]) == (400, param)


async def test_file_that_is_no_base64_is_shown_in_the_refusal(server: Gateway) -> None:
    refused = await post(server, "/v1/states", name="x", file="!" * 1000)
    message = error_of(refused)["message"]
    assert message.startswith('file must be base64, got "!!!')
    assert len(message) < 200


@pytest.mark.parametrize(
    ("session", "status", "param"),
    [
        ({"id": "nope"}, 404, "session.id"),
        ({"id": "empty"}, 400, "session"),
        ({"id": "full", "version": 0}, 400, "session.version"),
        ({"id": "full", "position": 0}, 400, "session.position"),
    ],
)
async def test_session_without_a_state_is_refused_by_the_field_that_names_it(
    server: Gateway, session: dict[str, Any], status: int, param: str
) -> None:
    for name in ("empty", "full"):
        assert (await post(server, "/v1/sessions", id=name)).status_code == 200
    assert (await post(server, "/v1/sessions/full/append", input="Hi")).status_code == 200
    refused = await post(server, "/v1/states", name="x", session=session)
    assert (refused.status_code, error_of(refused)["param"]) == (status, param)


async def test_file_that_is_no_state_is_refused_as_a_state(server: Gateway) -> None:
    wrong_type = await server.client.post("/v1/states/import?name=x", json={})
    assert (wrong_type.status_code, error_of(wrong_type)["message"].split(" must")[0]) == (
        415, "the Content-Type of a state's file"
    )  # fmt: skip
    damaged = await server.client.post("/v1/states/import?name=x", content=b"x", headers=FILE_HEADERS)
    assert (damaged.status_code, error_of(damaged)["code"]) == (400, "invalid_session_file")
    assert error_of(damaged)["message"].startswith("this is no state file that can be used: ")


def numerics_of(answer: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    """The classes that computed a returned state: the last one, and those before it."""
    snapshot = read_file(base64.b64decode(answer["state"]["data"])).snapshot
    assert snapshot is not None
    return snapshot.header.numerics, snapshot.header.earlier_numerics


async def test_a_returned_state_keeps_the_classes_that_computed_what_it_started_from() -> None:
    backend, fields = FakeBackend(), {"store": False, "return_state": True, "max_output_tokens": 16}
    async with gateway(backend, snapshot_tokens=0) as server:
        first = (await post(server, "/v1/responses", input="One?", max_output_tokens=16)).json()
        await post(server, "/v1/sessions", id="s")
        await post(server, "/v1/sessions/s/generate", input="Once", max_tokens=4)
        backend.model = dataclasses.replace(backend.model, numerics="other")
        await post(server, "/v1/sessions/s/generate", input="more", max_tokens=4)
        await create(server, session={"id": "s"})
        chained = await post(server, "/v1/responses", input="Hi", previous_response_id=first["id"], **fields)
        started = await post(server, "/v1/responses", input="Hi", state="rules", **fields)
        completed = await complete(server, state="rules", return_state=True)
        again = await complete(server, state=completed["state"]["data"], return_state=True)
        fresh = await complete(server, return_state=True)
    for answer in (chained.json(), started.json(), completed, again):
        assert numerics_of(answer) == ("other", ("fake",))
    assert numerics_of(fresh) == ("other", ())


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"state": "none"}, 404, "state"),
        ({"state": "rules@9"}, 404, "state"),
        ({"state": "a b"}, 400, "state"),
        ({"state": "x" * 200}, 400, "state"),
        ({"state": base64.b64encode(b"y" * 200).decode()}, 400, "state"),
        ({"return_state": True, "n": 2}, 400, "return_state"),
        ({"return_state": True, "prompt": ["a", "b"]}, 400, "return_state"),
        ({"return_state": True, "echo": True, "max_tokens": 0}, 400, "return_state"),
    ],
)
async def test_a_request_with_a_bad_state_is_refused_by_name(
    server: Gateway, fields: dict[str, Any], status: int, param: str
) -> None:
    await create(server)
    refused = await post(server, "/v1/completions", **{"prompt": "Hi", "max_tokens": 2, **fields})
    assert (refused.status_code, error_of(refused)["param"]) == (status, param)


async def test_a_state_of_another_model_is_made_again_from_its_log() -> None:
    store = SqliteSessionStore(None)
    async with gateway(FakeBackend(fingerprint="old"), store=store) as server:
        await create(server)
        raw = (await server.client.get("/v1/states/rules/export")).content
        other = await complete(server, prompt="Once", return_state=True)
        async with gateway(FakeBackend(fingerprint="new"), store=SharedStore(store)) as newer:
            shown = (await newer.client.get("/v1/states/rules")).json()
            assert (shown["model"], shown["model_fingerprint"]) == (None, "old")
            answer = await complete(newer, state="rules", return_state=True)
            assert answer["state"]["model_fingerprint"] == "new"
            again = await complete(newer, state=other["state"]["data"])
            assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == other["state"]["position"]
            made = await newer.client.post(
                "/v1/states/import", params={"name": "old"}, content=raw, headers=FILE_HEADERS
            )
            assert made.json()["model_fingerprint"] == "old"


async def test_a_state_of_another_tokenizer_is_made_again_from_its_text_or_refused() -> None:
    store = SqliteSessionStore(None)
    other = BpeTokenizer.train(["something else altogether"] * 8, vocab_size=280)
    async with gateway(FakeBackend(fingerprint="old"), store=store) as server:
        await create(server)
        await post(server, "/v1/sessions", id="s")
        await post(server, "/v1/sessions/s/generate", input="Once", max_tokens=4)
        await create(server, "talk", session={"id": "s"})
        async with gateway(FakeBackend(fingerprint="new", tokenizer=other), store=SharedStore(store)) as newer:
            answer = await complete(newer, state="rules")
            num_read = len(other.encode(RULES))  # with the start of the text, without the last token
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == num_read
            refused = await post(newer, "/v1/completions", prompt="Hi", state="talk")
            assert (refused.status_code, error_of(refused)["code"]) == (409, "state_mismatch")
            assert error_of(refused)["param"] == "state"
            raw = (await server.client.get("/v1/states/talk/export")).content
            taken = await newer.client.post(
                "/v1/states/import", params={"name": "copy"}, content=raw, headers=FILE_HEADERS
            )
            assert (taken.status_code, error_of(taken)["code"]) == (409, "state_mismatch")
            for one in (server, newer):
                assert one.services.backend.model.fingerprint in error_of(taken)["message"]


class SharedStore(SqliteSessionStore):
    """Another server's view of one store in memory, which it neither opens nor closes."""

    def __init__(self, other: SqliteSessionStore) -> None:
        super().__init__(None)
        self.database = other.database

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass


async def test_with_a_key_only_signed_states_are_taken(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("one", "two")]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([65 + number]) * 32)
    async with gateway(FakeBackend()) as plain, gateway(FakeBackend(), state_key_file=paths[0]) as signing:
        signed = (await complete(signing, return_state=True))["state"]["data"]
        assert (await complete(signing, state=signed))["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert (await complete(plain, state=signed))["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        session = await signing.client.post(
            "/v1/sessions/import", params={"id": "s"}, content=base64.b64decode(signed), headers=FILE_HEADERS
        )
        assert session.status_code == 200, session.text
        unsigned = (await complete(plain, return_state=True))["state"]["data"]
        async with gateway(FakeBackend(), state_key_file=paths[1]) as other:
            for asked, data in ((signing, unsigned), (other, signed)):
                refused = await post(asked, "/v1/completions", prompt="x", state=data)
                assert (refused.status_code, error_of(refused)["param"]) == (400, "state")
                assert "sign" in error_of(refused)["message"]
                raw = base64.b64decode(data)
                imported = await asked.client.post(
                    "/v1/sessions/import", params={"id": "t"}, content=raw, headers=FILE_HEADERS
                )
                assert (imported.status_code, "sign" in error_of(imported)["message"]) == (400, True)


async def test_with_a_key_an_exported_session_is_signed_and_imported_again(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"k" * 32)
    async with gateway(FakeBackend(), state_key_file=path) as server, gateway(FakeBackend()) as plain:
        for one in (server, plain):
            await post(one, "/v1/sessions", id="s")
            await post(one, "/v1/sessions/s/generate", input="Once", max_tokens=3)
        for one, status in ((server, 200), (plain, 400)):
            raw = (await one.client.get("/v1/sessions/s/export")).content
            made = await server.client.post(
                "/v1/sessions/import", params={"id": "copy"}, content=raw, headers=FILE_HEADERS
            )
            assert made.status_code == status, made.text


async def test_a_tenants_states_are_its_own_and_published_ones_everybodys(tmp_path: Path) -> None:
    acme, rival = make_key("acme"), make_key("rival")
    path = write_keys(tmp_path / "keys.toml", acme, rival, acme="", rival="")
    store = SqliteSessionStore(None)
    async with gateway(FakeBackend(), store=store, api_keys_file=path) as server:
        server.client.headers.update(acme.headers)
        await create(server)
        await create(server, "shared", text="For all")
        stored = await states_beside(store).load(tenant="acme", name="shared", version=1)
        assert stored is not None
        library = server.services.states
        await library.add(PUBLISHED, "shared", await library.read_file(stored.file), source="file", metadata={})
        server.client.headers.update(rival.headers)
        listed = (await server.client.get("/v1/states")).json()["data"]
        assert [(state["id"], state["published"]) for state in listed] == [("shared@1", True)]
        assert (await complete(server, state="shared"))["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert (await post(server, "/v1/completions", prompt="x", state="rules")).status_code == 404
        for reference in ("shared", "shared@1"):
            refused = await server.client.delete(f"/v1/states/{reference}")
            assert (refused.status_code, "published" in error_of(refused)["message"]) == (403, True)
        assert (await server.client.delete("/v1/states/shared@2")).status_code == 404
        raw = (await server.client.get("/v1/states/shared/export")).content
        taken = await post(server, "/v1/states", name="shared", text="Mine")
        imported = await server.client.post(
            "/v1/states/import", params={"name": "shared"}, content=raw, headers=FILE_HEADERS
        )
        for answer in (taken, imported):
            assert (answer.status_code, error_of(answer)["param"]) == (409, "name")
    async with gateway(FakeBackend(), store=SqliteSessionStore(None), api_keys_file=path) as server:
        assert (await server.client.get("/v1/states")).status_code == 401


async def test_a_tenants_own_name_wins_over_one_published_later(server: Gateway) -> None:
    own = await create(server, text="Mine")
    stored = await states_beside(server.store).load(tenant="default", name="rules", version=1)
    assert stored is not None
    library = server.services.states
    for _ in range(2):
        await library.add(PUBLISHED, "rules", await library.read_file(stored.file), source="file", metadata={})
    assert (await server.client.get("/v1/states/rules")).json() == own
    assert (await server.client.get("/v1/states/rules@2")).status_code == 404
    assert (await create(server, text="Mine again"))["id"] == "rules@2"
    assert (await server.client.delete("/v1/states/rules")).status_code == 200
    assert (await server.client.get("/v1/states/rules@2")).json()["published"] is True


async def test_a_state_of_another_numerics_class_is_made_again_from_its_log(tmp_path: Path) -> None:
    path, backend = tmp_path / "sessions.db", FakeBackend()
    backend.model = dataclasses.replace(backend.model, numerics="other")
    async with gateway(FakeBackend(), store=SqliteSessionStore(path)) as server:
        await create(server)
        data = (await complete(server, state="rules", return_state=True))["state"]["data"]
    async with gateway(backend, store=SqliteSessionStore(path)) as other:
        for name, state in (("named", "rules"), ("data", data)):
            before = len(backend.requests)
            made = await post(other, "/v1/sessions", id=name, state=state)
            assert made.status_code == 200, made.text
            assert len(backend.requests) == before + 1
            turn = await post(other, f"/v1/sessions/{name}/generate", input=" Hi", max_tokens=2)
            assert turn.status_code == 200, turn.text
            assert "taken_over_from" not in turn.json()["session"]
        before = len(backend.requests)
        await complete(other, state="rules")
        assert len(backend.requests) == before + 1  # the state that was made again is kept


async def test_states_count_in_the_quota_of_stored_bytes(tmp_path: Path) -> None:
    acme = make_key("acme")
    path = write_keys(tmp_path / "keys.toml", acme, acme="max_stored_bytes = 5000")
    async with gateway(FakeBackend(), api_keys_file=path) as server:
        server.client.headers.update(acme.headers)
        for _ in range(20):
            response = await post(server, "/v1/states", name="rules", text=RULES)
            if response.status_code != 200:
                break
        assert (response.status_code, error_of(response)["code"]) == (429, "quota_exceeded")
        await server.client.delete("/v1/states/rules")
        assert (await post(server, "/v1/states", name="rules", text=RULES)).status_code == 200
