"""Public clients of Triton, as their users run them: tritonclient, synchronous; curl; and NVIDIA's perf_analyzer."""

from __future__ import annotations

import asyncio
import json
import queue
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc

from tests.support.triton_servers import MODEL, RunningTriton, TritonClient

pytestmark = pytest.mark.triton

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = "".join((ROOT / folder / "triton.md").read_text("utf-8") for folder in ("docs", "benchmarks/notes"))
NUM_REQUESTS, NUM_TOKENS = 24, 5  # of the load


def documented(program: str) -> list[str]:
    """The commands of docs/triton.md and its notes that run a program, each in one line."""
    lines = DOCUMENT.replace("\\\n", " ").splitlines()
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ ") and program in line]


def run(command: str, directory: Path) -> str:
    done = subprocess.run(["bash", "-c", command], cwd=directory, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def text_input(text: str) -> triton_grpc.InferInput:
    tensor = triton_grpc.InferInput("text_input", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode()], dtype=np.object_))
    return tensor


def test_T6_requests_on_the_one_stream_of_a_synchronous_client(triton: RunningTriton) -> None:
    """They run side by side, and one that is refused leaves the others alive."""
    answers: queue.Queue[tuple[Any, Exception | None]] = queue.Queue()
    texts: dict[str, str] = {}
    finals: list[str] = []
    errors: list[str] = []
    with triton_grpc.InferenceServerClient(triton.grpc_url) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for number in range(NUM_REQUESTS):
            options = {
                "max_tokens": 0 if number == 1 else NUM_TOKENS,
                "stream": True,
                "seed": number,
                "ignore_eos": True,
            }
            client.async_stream_infer(
                MODEL,
                [text_input("It was")],
                request_id=str(number),
                parameters=options,
                enable_empty_final_response=True,
            )
        while len(finals) + len(errors) < NUM_REQUESTS:
            result, error = answers.get(timeout=60)
            if error is not None:
                errors.append(str(error))
                continue
            response = result.get_response()
            texts[response.id] = texts.get(response.id, "") + result.as_numpy("text_output")[0].decode()
            if response.parameters["triton_final_response"].bool_param:
                assert result.as_numpy("finish_reason")[0] == b"length"
                finals.append(response.id)
        client.stop_stream()
    assert sorted(finals, key=int) == [str(number) for number in range(NUM_REQUESTS) if number != 1]
    assert len(set(texts.values())) > 1
    (refusal,) = errors
    assert "invalid_request: max_tokens" in refusal


def test_the_documented_calls_of_curl(triton: RunningTriton, tmp_path: Path) -> None:
    whole, streamed = (
        run(command.replace("localhost:8003", triton.http_url.removeprefix("http://")), tmp_path)
        for command in documented("curl -s")
    )
    assert json.loads(whole)["finish_reason"] in ("length", "stop")
    events = [json.loads(line.removeprefix("data:")) for line in streamed.splitlines() if line]
    assert "".join(event["text_output"] for event in events) == json.loads(whole)["text_output"]


@pytest.mark.perf_analyzer
async def test_the_documented_load_of_perf_analyzer(
    triton: RunningTriton, client: TritonClient, tmp_path: Path
) -> None:
    """It gets every token of every request, as many at a time as it was told."""
    prompts, command = documented("prompts.json")
    installed = Path(sys.prefix) / "perf-analyzer"
    command = command.replace(".venv/perf-analyzer", str(installed)).replace("localhost:8001", triton.grpc_url)
    command = re.sub(r"max_tokens:\d+", f"max_tokens:{NUM_TOKENS}", command)
    command = re.sub(r"--request-count \d+", f"--request-count {NUM_REQUESTS}", command)
    before = (await client.status()).engine
    run(prompts, tmp_path)
    output = await asyncio.to_thread(run, command, tmp_path)
    assert f"Request count: {NUM_REQUESTS}" in output
    (experiment,) = json.loads((tmp_path / "profile.json").read_text("utf-8"))["experiments"]
    answers = [request["response_outputs"] for request in experiment["requests"]]
    assert len(answers) == NUM_REQUESTS
    for outputs in answers:
        assert [output["finish_reason"] for output in outputs if output["finish_reason"]] == ["length"]
        assert json.loads(outputs[-1]["details"])["completion_tokens"] == NUM_TOKENS
    after = (await client.status()).engine
    assert after.tokens_generated - before.tokens_generated >= NUM_REQUESTS * NUM_TOKENS
    assert after.num_running == after.num_waiting == 0
