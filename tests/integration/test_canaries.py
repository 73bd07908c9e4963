"""Every session is told a secret of its own. Nothing that another one is answered depends on it, or shows it."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from pathlib import Path
from typing import Any

import httpx

from service.stores.sessions.sqlite import SqliteSessionStore
from tests.support.backends import MakeBackend
from tests.support.counts import scaled
from tests.support.gateway import Gateway, error_of, gateway
from tests.support.tenants import TestKey, make_key, write_keys

NUM_SESSIONS = scaled(10, 50)
GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "logprobs": 3}


@dataclasses.dataclass(frozen=True, slots=True)
class Teller:
    """A session, its secret and whose it is. Ids are alike for both tenants: only the key tells them apart."""

    number: int
    secret: str
    key: TestKey

    @property
    def session_id(self) -> str:
        return f"s{self.number // 2}"

    @property
    def path(self) -> str:
        return f"/v1/sessions/{self.session_id}"


def make_tellers(keys: tuple[TestKey, TestKey]) -> list[Teller]:
    draw = random.Random(5)
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    return [Teller(number, "".join(draw.choices(letters, k=24)), keys[number % 2]) for number in range(NUM_SESSIONS)]


async def call(server: Gateway, teller: Teller, method: str, path: str, **fields: Any) -> httpx.Response:
    return await server.client.request(method, path, headers=teller.key.headers, **fields)


async def ask(server: Gateway, teller: Teller, text: str, *, path: str | None = None) -> Any:
    response = await call(server, teller, "POST", f"{path or teller.path}/generate", json={"input": text, **GREEDY})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


async def live(server: Gateway, teller: Teller) -> list[Any]:
    """A session from its creation on: resumed, forked, taken back. What it was answered."""
    assert (await call(server, teller, "POST", "/v1/sessions", json={"id": teller.session_id})).status_code == 200
    answers = [await ask(server, teller, f"My secret is {teller.secret}. Keep it.")]
    answers.append(await ask(server, teller, "What is the secret?"))
    forked = await call(server, teller, "POST", f"{teller.path}/fork", json={"id": f"fork-{teller.session_id}"})
    assert forked.status_code == 200, forked.text
    answers.append(await ask(server, teller, "Say it again.", path=f"/v1/sessions/fork-{teller.session_id}"))
    assert (await call(server, teller, "POST", f"{teller.path}/rewind", json={"to_version": 1})).status_code == 200
    answers.append(await ask(server, teller, "What is the secret?"))
    return answers


def is_close(one: Any, other: Any) -> bool:
    """The same text, and log probabilities that differ no more than batches of other shapes make them."""
    probabilities = [choice["logprobs"]["token_logprobs"] for choice in (one, other)]
    gaps = [abs(a - b) for a, b in zip(*probabilities, strict=True)]
    return one["text"] == other["text"] and max(gaps) < 1e-3


async def test_L1_what_a_session_is_answered_is_what_it_would_be_alone(
    make_backend: MakeBackend, tmp_path: Path
) -> None:
    keys = (make_key("a"), make_key("b"))
    file = write_keys(tmp_path / "keys.toml", *keys, a="", b="")
    tellers = make_tellers(keys)
    store = SqliteSessionStore(tmp_path / "sessions.db")
    crowded = make_backend()
    async with gateway(crowded, store=store, api_keys_file=file) as crowd:
        together = await asyncio.gather(*(live(crowd, teller) for teller in tellers))
        texts = [await asks_for_trouble(crowd, teller) for teller in tellers]
    assert len({str(answers[1]) for answers in together}) == NUM_SESSIONS  # the secret matters to what is answered
    for teller, answers in zip(tellers, together, strict=True):
        async with gateway(make_backend(), api_keys_file=file) as alone:
            expected = await live(alone, teller)
        assert all(is_close(*pair) for pair in zip(answers, expected, strict=True)), teller
    for teller, text in zip(tellers, texts, strict=True):
        assert not [other.secret for other in tellers if other is not teller and other.secret in text]
        assert teller.secret not in text  # errors show no text of a conversation, not even one's own


async def asks_for_trouble(server: Gateway, teller: Teller) -> str:
    """The bodies of all the ways in which calls on one's own and on others' sessions fail."""
    generate = f"{teller.path}/generate"
    foreign = "sess_" + "0" * 32
    calls: list[tuple[str, str, dict[str, Any]]] = [
        ("POST", generate, {"input": "x", "expected_version": 99}),
        ("POST", generate, {"input": [10**6]}),
        ("POST", generate, {"input": "x", "temperature": 9}),
        ("POST", generate, {"input": "x", "wish": "y"}),
        ("POST", f"{teller.path}/rewind", {"to_version": 77}),
        ("POST", f"{teller.path}/rewind", {"to_position": 10**6}),
        ("POST", f"{teller.path}/fork", {"id": teller.session_id}),
        ("POST", "/v1/sessions", {"id": teller.session_id}),
        ("GET", f"/v1/sessions/{foreign}", {}),
        ("GET", f"/v1/sessions/s{NUM_SESSIONS}", {}),
        ("POST", f"/v1/sessions/{foreign}/generate", {"input": "x"}),
        ("GET", f"/v1/streams/{foreign}", {}),
        ("GET", f"/v1/responses/resp_{teller.session_id}", {}),
    ]
    texts = []
    for method, path, body in calls:
        response = await call(server, teller, method, path, **({"json": body} if body else {}))
        assert 400 <= response.status_code < 500, (path, response.text)
        error_of(response)
        texts.append(response.text)
    listed = await call(server, teller, "GET", "/v1/sessions", params={"limit": 100})
    mine = {session["id"] for session in listed.json()["data"]}
    assert mine <= {f"{prefix}s{number}" for prefix in ("", "fork-") for number in range(NUM_SESSIONS)}
    return "\n".join((*texts, listed.text))


async def test_L6_R2_a_state_in_anothers_place_is_refused_and_shows_nothing(
    make_backend: MakeBackend, tmp_path: Path
) -> None:
    """As if the store had mixed up two sessions: the other one's secret is neither used nor told."""
    keys = (make_key("a"), make_key("b"))
    file = write_keys(tmp_path / "keys.toml", *keys, a="", b="")
    mine, theirs = make_tellers(keys)[:2]
    store = SqliteSessionStore(tmp_path / "sessions.db")
    stored: dict[str, Any] = {"snapshot_tokens": 0, "state_cache_mb": 0}  # what memory has is not mixed up with it
    async with gateway(make_backend(), store=store, api_keys_file=file, **stored) as server:
        for teller in (mine, theirs):
            await live(server, teller)
        other = "SELECT snapshot FROM snapshots WHERE tenant = 'b' AND session_id = ?"
        statement = f"UPDATE snapshots SET snapshot = ({other}) WHERE tenant = 'a' AND session_id = ?"
        await store.database.write(
            lambda connection: connection.execute(statement, (theirs.session_id, mine.session_id))
        )
        refused = await call(server, mine, "POST", f"{mine.path}/generate", json={"input": "x", **GREEDY})
        assert (refused.status_code, error_of(refused)["code"]) == (500, "snapshot_corrupt")
        assert theirs.secret not in refused.text
        assert '"b"' not in refused.text
