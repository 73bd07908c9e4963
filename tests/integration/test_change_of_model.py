"""A store whose sessions another model made: the server refuses their turns, and commands move them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from nsm_core.model.bundled import BUNDLED
from service.cli.commands import app
from tests.support.server_processes import Server, running

OLD = {"MODEL": "pulse-books-small", "EXECUTOR": "eager"}
NEW: dict[str, object] = {"MODEL": BUNDLED.name}
IDENTITY = {"Idempotency-Key": "once"}
OPENING = "It was the best of times,"
TURN: dict[str, Any] = {"max_tokens": 8, "seed": 7}


async def refused(server: Server, path: str, **body: Any) -> str:
    """The message of a 409 `state_mismatch`."""
    response = await (server.client.post(path, json=body, headers=IDENTITY) if body else server.client.get(path))
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (409, "state_mismatch")
    return str(error["message"])


async def printed(*command: str, data_dir: Path) -> str:
    """By a command of `nsm sessions` with the new model."""
    words = ["sessions", *command, "--data-dir", str(data_dir), "--model", BUNDLED.name]
    return (await asyncio.to_thread(CliRunner().invoke, app, words)).stdout


async def test_R3_sessions_of_another_model_are_refused_until_they_are_moved(tmp_path: Path) -> None:
    async with running(OLD, tmp_path) as server:
        await server.say_once("known", OPENING, **TURN)
        await server.create("killed")
        server.client.headers.update(IDENTITY)
        await server.kill_in_mid_stream("killed", OPENING, seed=7)
    async with running(NEW, tmp_path) as server:
        both = "`nsm serve --model pulse-books-keyed --model pulse-books-small` also continues theirs"
        ways = f"`nsm sessions migrate` moves sessions to the running model, {both}"
        assert "the newest session was made by model pulse-books-small (" in server.start
        assert ways in server.start
        message = await refused(server, "/v1/sessions/known/states")
        assert "was made by model pulse-books-small (" in message
        assert ways in message
        unfinished = {"input": OPENING, "max_tokens": 20_000, "stream": True, "seed": 7}
        assert "was begun by model pulse-books-small (" in await refused(
            server, "/v1/sessions/killed/generate", **unfinished
        )
        for path, body in (
            ("generate", {"input": " and then", "max_tokens": 8}),
            ("append", {"input": " and then"}),
            ("rewind", {"to_position": 3}),
            ("fork", {"id": "earlier", "position": 3}),
        ):
            message = await refused(server, f"/v1/sessions/known/{path}", **body)
            assert "session 'known' was made by model pulse-books-small (" in message
            assert ways in message
        shown = (await server.client.get("/v1/sessions/known")).json()
        assert (shown["version"], shown["model"]) == (1, None)
        assert shown["unserved_model"].startswith("pulse-books-small (")
        assert (await server.client.get("/v1/sessions/known/export")).status_code == 200
        assert (await server.client.post("/v1/sessions/known/fork", json={"id": "copy"})).status_code == 200
        assert (await server.client.delete("/v1/sessions/copy")).status_code == 200
        instead = await server.say("killed", "Chapter two.", max_tokens=8)  # nothing was committed: a new turn
        assert instead["session"]["version"] == 1
    async with running(OLD, tmp_path) as server:  # back: as if nothing had been
        again = await server.say("known", " and then", max_tokens=8)
        assert "rebuilt" not in again["session"]
        assert again["session"]["version"] == 2


async def test_R3_a_refused_request_leaves_an_unfinished_turn_to_its_model(tmp_path: Path) -> None:
    unfinished = {"input": " and then", "max_tokens": 20_000, "stream": True, "seed": 7}
    async with running(OLD, tmp_path) as server:
        await server.say_once("known", OPENING, **TURN)
        server.client.headers.update({"Idempotency-Key": "unfinished"})
        await server.kill_in_mid_stream("known", " and then", seed=7)
    async with running(NEW, tmp_path) as server:
        await refused(server, "/v1/sessions/known/generate", input="Chapter two.", max_tokens=8)
        await refused(server, "/v1/sessions/known/append", input="Chapter two.")
    async with running(OLD, tmp_path) as server:
        headers = {"Idempotency-Key": "unfinished"}
        path = "/v1/sessions/known/generate"
        async with server.client.stream("POST", path, json=unfinished, headers=headers) as stream:
            assert stream.status_code == 200
            assert '"finish_reason":null' in await anext(
                line async for line in stream.aiter_lines() if line.startswith("data:")
            )
        assert "nsm_turn_takeover_total 1.0" in (await server.client.get("/metrics")).text


async def test_R3_migrated_sessions_go_on_from_a_state_of_the_new_model(tmp_path: Path) -> None:
    async with running(OLD, tmp_path) as server:
        await server.say_once("known", OPENING, **TURN)
        server.process.kill()
        await server.process.wait()
    assert OPENING in await printed("log", "known", data_dir=tmp_path)
    assert await printed("migrate", data_dir=tmp_path) == "migrate: 1 migrated\n"
    async with running(NEW, tmp_path) as server:
        assert "was made by model" not in server.start
        again = await server.say("known", " and then", max_tokens=8)
        assert "rebuilt" not in again["session"]
        assert again["usage"]["prompt_tokens_details"].get("replayed_tokens", 0) == 0


async def test_a_start_warns_of_a_newest_session_of_another_model(tmp_path: Path) -> None:
    async with running({"MODEL": BUNDLED.name}, tmp_path) as server:
        await server.say_once("known", OPENING, **TURN)
    async with running(OLD, tmp_path) as server:
        assert f"the newest session was made by model {BUNDLED.name} (" in server.start
        assert f"--model {BUNDLED.name}` also continues theirs" in server.start
