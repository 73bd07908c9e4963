"""A real server process on a socket, killed with -9 in mid-stream, and one that takes its place."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from tests.support.backends import BACKENDS, settings_of
from tests.support.server_processes import running

GREEDY = {
    "temperature": 0.0,
    "ignore_eos": True,
    "logprobs": 1,
}  # log-probabilities tell states apart that texts do not
SAMPLED = {"temperature": 1.0, "ignore_eos": True, "logprobs": 1}
TURNS = ("It was the best of times,", " and then", " at last")


@pytest.fixture(params=[*BACKENDS, "workers", "devices", "rwkv7-workers"])
def server_settings(request: pytest.FixtureRequest, tiny_model_dir: Path) -> dict[str, object]:
    """As `backend_settings`, and with the engine in one or two processes of their own."""
    if request.param in ("workers", "devices", "rwkv7-workers"):
        device = "cpu,cpu" if request.param == "devices" else "cpu"
        model = request.getfixturevalue("rwkv7_dir") if request.param == "rwkv7-workers" else tiny_model_dir
        return {"MODEL": model, "NUM_THREADS": 1, "DEVICE": device, "WORKERS": 2}
    return settings_of(request)


async def test_R14_a_session_continues_after_kill_9_as_if_nothing_had_happened(
    server_settings: dict[str, object], tmp_path: Path
) -> None:
    kinds = {"greedy": GREEDY, "sampled": SAMPLED}
    first_turn: dict[str, Any] = {"seed": 7}  # later turns name none: the session keeps it
    unbroken: dict[str, list[dict[str, Any]]] = {}
    async with running(server_settings, tmp_path) as server:
        for kind, sampling in kinds.items():
            await server.create(f"unbroken-{kind}")
            unbroken[kind] = [
                await server.say(f"unbroken-{kind}", text, **sampling, **(first_turn if number == 0 else {}))
                for number, text in enumerate(TURNS)
            ]
            fresh = await server.say_once(f"fresh-{kind}", TURNS[1], **sampling, **first_turn)
            assert fresh["choices"] != unbroken[kind][1]["choices"]  # the earlier turn matters
            await server.create(f"killed-{kind}")
            await server.say(f"killed-{kind}", TURNS[0], **sampling, **first_turn)
        await server.kill_in_mid_stream("killed-greedy", TURNS[1], **GREEDY)
    async with running(server_settings, tmp_path) as server:
        for kind, sampling in kinds.items():
            version, position = await server.head(f"killed-{kind}")
            assert (version, position) == (1, unbroken[kind][0]["session"]["position"])
            for number, text in enumerate(TURNS[1:], start=1):
                expected = unbroken[kind][number]
                answer = await server.say(f"killed-{kind}", text, **sampling)
                # covered by a state, or read again: the killed process may have had the newest state alone
                assert sum(answer["usage"].pop("prompt_tokens_details").values()) == position
                assert answer["choices"] == expected["choices"]
                del expected["usage"]["prompt_tokens_details"]
                assert answer["usage"] == expected["usage"]
                position = answer["session"]["position"]
                assert answer["session"] == {"id": f"killed-{kind}", "version": number + 1, "position": position}
                assert position == expected["session"]["position"]


async def test_R3_a_state_that_was_lost_on_the_disk_is_made_again_from_the_log(
    backend_settings: dict[str, object], tmp_path: Path
) -> None:
    async with running(backend_settings, tmp_path) as server:
        for session_id in ("unbroken", "missing", "corrupt"):
            await server.say_once(session_id, TURNS[0], **SAMPLED, seed=7)
        expected = await server.say("unbroken", TURNS[1], **SAMPLED)
    with contextlib.closing(sqlite3.connect(tmp_path / "sessions.db")) as database, database:
        database.execute("DELETE FROM snapshots WHERE session_id = 'missing'")
        database.execute("UPDATE snapshots SET snapshot = substr(snapshot, 1, 5000) WHERE session_id = 'corrupt'")
    async with running(backend_settings, tmp_path) as server:
        for session_id in ("missing", "corrupt"):
            answer = await server.say(session_id, TURNS[1], **SAMPLED)
            assert answer["session"] == {**expected["session"], "id": session_id, "rebuilt": session_id}
            assert answer["choices"][0]["text"] == expected["choices"][0]["text"]
            assert answer["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            metrics = (await server.client.get("/metrics")).text
            assert f'nsm_session_resume_total{{outcome="{session_id}"}} 1.0' in metrics
            again = await server.say(session_id, TURNS[2], **SAMPLED)
            assert "rebuilt" not in again["session"]
