"""A realtime conversation and a server that is killed in the middle of an answer."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import websockets

from tests.support.backends import PROCESSES
from tests.support.server_processes import Server, running
from tests.support.slow_steps import slow_steps

ITEM = {"type": "message", "role": "user", "id": "item_1", "content": [{"type": "input_text", "text": "Who is there?"}]}
CREATE = {"type": "response.create", "event_id": "answer_1", "response": {"max_output_tokens": 400, "seed": 7}}


async def converse(server: Server, session: str | None, *, kill_after: int | None = None) -> tuple[str, str, str]:
    """The session's id, the joined deltas, and the response's id; what came until the server was killed."""
    url = str(server.client.base_url).replace("http", "ws") + "/v1/realtime"
    text, response_id, num_deltas, session_id = "", "", 0, session or ""
    with contextlib.suppress(websockets.ConnectionClosedError):
        async with websockets.connect(url if session is None else f"{url}?session={session}") as socket:
            await socket.send(json.dumps({"type": "conversation.item.create", "item": ITEM}))
            await socket.send(json.dumps(CREATE))
            async for raw in socket:
                event: dict[str, Any] = json.loads(raw)
                assert event["type"] != "error", event
                if event["type"] == "session.created":
                    session_id = event["session"]["id"]
                elif event["type"] == "response.output_text.delta":
                    text, num_deltas = text + event["delta"], num_deltas + 1
                    response_id = event["response_id"]
                    if num_deltas == kill_after:
                        server.kill()
                elif event["type"] == "response.done":
                    break
    return session_id, text, response_id


@pytest.mark.parametrize("kind", ["local", "rwkv7", "workers"])
async def test_kill_9_in_an_answer_and_the_client_connects_again(
    tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue("rwkv7_dir" if kind == "rwkv7" else "tiny_model_dir")
    settings: dict[str, object] = {"MODEL": model, "NUM_THREADS": 1, **PROCESSES.get(kind, {})}
    async with running(settings, tmp_path) as victim:
        _, undisturbed, _ = await converse(victim, None)
        with slow_steps():
            session_id, before, first_id = await converse(victim, None, kill_after=5)
        await victim.process.wait()
    assert before
    assert undisturbed.startswith(before)
    assert undisturbed != before
    async with running(settings, tmp_path) as server:
        _, text, again_id = await converse(server, session_id)
        assert (text, again_id) == (undisturbed, first_id)
        head = (await server.client.get(f"/v1/sessions/{session_id}")).json()
        assert head["version"] == 2  # the item, once, and the answer
