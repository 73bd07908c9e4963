"""A real server process on a socket, killed with -9 in mid-stream, and one that takes its place."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sqlite3
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from nsm_core.config import ModelConfig
from nsm_core.model.nsm import NsmModel
from nsm_core.model.storage import WeightFormat, save_model
from nsm_core.tokenizer import Tokenizer

REPOSITORY = Path(__file__).parents[2]
SERVE = "from service.server import run; from service.settings import load_settings; run(load_settings())"
GREEDY = {
    "temperature": 0.0,
    "ignore_eos": True,
    "logprobs": 1,
}  # log-probabilities tell states apart that texts do not
SAMPLED = {"temperature": 1.0, "ignore_eos": True, "logprobs": 1}
TURNS = ("It was the best of times,", " and then", " at last")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Tokenizer) -> Path:
    config = ModelConfig(
        vocab_size=tiny_tokenizer.vocab_size,
        d_model=32,
        num_layers=2,
        num_heads=2,
        num_memory_slots=8,
        write_top_k=2,
        mlp_hidden=64,
    )
    directory = tmp_path_factory.mktemp("tiny-model")
    torch.manual_seed(0)
    model = NsmModel(config).requires_grad_(False)
    for weight in model.parameters():
        if weight.dim() >= 2:  # a fresh model has zeros where its state would come to matter
            weight.normal_(std=weight.shape[-1] ** -0.5)
    save_model(model, tiny_tokenizer, directory, WeightFormat.FP32)
    return directory


class Server:
    """One process and a client of it."""

    def __init__(self, process: asyncio.subprocess.Process, client: httpx.AsyncClient) -> None:
        self.process = process
        self.client = client

    async def create(self, session_id: str) -> None:
        response = await self.client.post("/v1/sessions", json={"id": session_id})
        assert response.status_code == 200, response.text

    async def say(self, session_id: str, text: str, **body: Any) -> dict[str, Any]:
        body = {"input": text, "max_tokens": 24, **body}
        response = await self.client.post(f"/v1/sessions/{session_id}/generate", json=body)
        assert response.status_code == 200, response.text
        return dict(response.json())

    async def say_once(self, session_id: str, text: str, **body: Any) -> dict[str, Any]:
        await self.create(session_id)
        return await self.say(session_id, text, **body)

    async def head(self, session_id: str) -> tuple[int, int]:
        session = (await self.client.get(f"/v1/sessions/{session_id}")).json()
        return session["version"], session["position"]

    async def kill_in_mid_stream(self, session_id: str, text: str, **body: Any) -> None:
        """kill -9 after a few chunks of a turn that would go on for long."""
        body = {"input": text, "max_tokens": 20_000, "stream": True, **body}
        num_chunks = 0
        with contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError):
            async with self.client.stream("POST", f"/v1/sessions/{session_id}/generate", json=body) as stream:
                async for line in stream.aiter_lines():
                    assert '"finish_reason":null' in line or not line.startswith("data:")
                    num_chunks += line.startswith("data:")
                    if num_chunks == 5:
                        self.process.kill()
        assert await self.process.wait() == -9
        assert num_chunks >= 5


@contextlib.asynccontextmanager
async def running(model_dir: Path, data_dir: Path, **changes: object) -> AsyncIterator[Server]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("NSM_")}
    settings = {"MODEL": model_dir, "DATA_DIR": data_dir, "PORT": 0, "NUM_THREADS": 1, "GRACE_S": 1, **changes}
    environment.update({f"NSM_{name}": str(value) for name, value in settings.items()})
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVE, cwd=REPOSITORY, env=environment, stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    try:
        url = await read_url(process.stderr)
        async with asyncio.TaskGroup() as group, httpx.AsyncClient(base_url=url, timeout=60.0) as client:
            group.create_task(process.stderr.read())  # a full pipe would stop the server
            yield Server(process, client)
            stop(process)
    finally:
        stop(process)
        await process.wait()


def stop(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):  # killed by the test
        process.terminate()


async def read_url(log: asyncio.StreamReader) -> str:
    lines = []
    async for line in log:
        lines.append(line.decode())
        found = re.search(r"serving .* on (http://\S+)", lines[-1])
        if found:
            return found[1]
    raise RuntimeError("the server did not start:\n" + "".join(lines))


@pytest.fixture(params=["local", pytest.param("triton", marks=pytest.mark.triton)])
def backend(request: pytest.FixtureRequest) -> dict[str, object]:
    """Settings of a server: the model in its process, or in a Triton server that lives on when it is killed."""
    if request.param == "local":
        return {}
    triton = request.getfixturevalue("triton")
    return {"BACKEND": "triton", "TRITON_URL": triton.grpc_url, "MODEL": "", "NUM_THREADS": ""}


async def test_R14_a_session_continues_after_kill_9_as_if_nothing_had_happened(
    model_dir: Path, tmp_path: Path, backend: dict[str, object]
) -> None:
    kinds = {"greedy": GREEDY, "sampled": SAMPLED}
    first_turn: dict[str, Any] = {"seed": 7}  # later turns name none: the session keeps it
    unbroken: dict[str, list[dict[str, Any]]] = {}
    async with running(model_dir, tmp_path, **backend) as server:
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
    async with running(model_dir, tmp_path, **backend) as server:
        for kind, sampling in kinds.items():
            version, position = await server.head(f"killed-{kind}")
            assert (version, position) == (1, unbroken[kind][0]["session"]["position"])
            for number, text in enumerate(TURNS[1:], start=1):
                expected = unbroken[kind][number]
                answer = await server.say(f"killed-{kind}", text, **sampling)
                assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == position
                assert answer["choices"] == expected["choices"]
                assert answer["usage"] == expected["usage"]
                position = answer["session"]["position"]
                assert answer["session"] == {"id": f"killed-{kind}", "version": number + 1, "position": position}
                assert position == expected["session"]["position"]


async def test_R3_a_state_that_was_lost_on_the_disk_is_made_again_from_the_log(
    model_dir: Path, tmp_path: Path, backend: dict[str, object]
) -> None:
    async with running(model_dir, tmp_path, **backend) as server:
        for session_id in ("unbroken", "missing", "corrupt"):
            await server.say_once(session_id, TURNS[0], **SAMPLED, seed=7)
        expected = await server.say("unbroken", TURNS[1], **SAMPLED)
    with contextlib.closing(sqlite3.connect(tmp_path / "sessions.db")) as database, database:
        database.execute("DELETE FROM snapshots WHERE session_id = 'missing'")
        database.execute("UPDATE snapshots SET snapshot = substr(snapshot, 1, 5000) WHERE session_id = 'corrupt'")
    async with running(model_dir, tmp_path, **backend) as server:
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
