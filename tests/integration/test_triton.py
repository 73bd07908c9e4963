"""The model inside a real Triton server, over gRPC as a gateway asks it and over HTTP as curl does."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc.aio as triton_grpc
from tritonclient.grpc import service_pb2

from nsm_core.config import EngineConfig
from nsm_core.engine.engine import Engine
from nsm_core.engine.request import Finished, FinishReason, GenerationRequest, PromptScored, PromptState, TokenEvent
from nsm_core.errors import DeadlineExceeded, EngineDead, InvalidRequest, Overloaded, SnapshotCorrupt, StateMismatch
from nsm_core.model.loader import LoadedNsm, load_checkpoint
from nsm_core.sampling.params import SamplingParams
from nsm_core.tokenizer_files import tokenizer_from_json
from nsm_core.wire.call_tensors import decode_resume, encode_call
from nsm_core.wire.calls import DescribeCall, GenerateCall, InspectCall, call_of, state_id
from nsm_core.wire.description import decode_description, decode_report
from nsm_core.wire.errors import StateMissing
from nsm_core.wire.tensors import Tensors
from tests.nsm_core.engine.harness import run_one
from tests.support.event_decoder import EventDecoder
from tests.support.slow_steps import slow_steps
from tests.support.triton_servers import MAX_SLOTS, QUEUE_LIMIT, RunningTriton, TritonClient, eventually, running_triton

pytestmark = pytest.mark.triton

PROMPT = (0, 17, 200, 41, 9)
ENDLESS = 131_072


def sampling(max_tokens: int = 12, **fields: Any) -> SamplingParams:
    """Sampled, as greedy random models repeat themselves; log-probabilities tell states apart that ids do not."""
    return SamplingParams(**{"max_tokens": max_tokens, "seed": 5, "ignore_eos": True, "logprobs": 1, **fields})


def stream_call(**fields: Any) -> GenerateCall:
    return GenerateCall(**{"prompt_ids": PROMPT, "sampling": sampling(), "stream": True, **fields})


@pytest.fixture(scope="module")
def loaded(tiny_model_dir: Path) -> LoadedNsm:
    return load_checkpoint(tiny_model_dir)


@pytest.fixture
def engine(loaded: LoadedNsm) -> Engine:
    """The same model without Triton."""
    return Engine(loaded.model, loaded.tokenizer, fingerprint=loaded.fingerprint, config=EngineConfig())


async def wait_for_requests(client: TritonClient, number: int) -> None:
    """Until so many run or wait."""

    async def has_so_many() -> bool:
        engine = (await client.status()).engine
        return engine.num_running + engine.num_waiting == number

    await eventually(has_so_many)


async def wait_until_idle(client: TritonClient) -> None:
    await wait_for_requests(client, 0)


async def test_a_stream_carries_exactly_what_the_engine_says(client: TritonClient, engine: Engine) -> None:
    request = GenerationRequest(
        request_id="a",
        prompt_ids=PROMPT,
        sampling=sampling(logprobs=2, stop=("zzz",)),
        keep_state=True,
        prompt_logprobs=1,
        keep_states_at=(2, 5),
    )
    answers = await client.call(call_of(request, now=0.0))
    assert answers.events == run_one(engine, request).events
    kinds = [type(event) for event in answers.events]
    assert kinds == [PromptScored, PromptState, PromptState, *[TokenEvent] * 12, Finished]


async def test_a_text_is_read_behind_the_start_token(client: TritonClient, loaded: LoadedNsm) -> None:
    ids = (loaded.tokenizer.end_of_text_id, *loaded.tokenizer.encode("It was"))
    by_text = await client.call(stream_call(prompt_ids=None, text="It was"))
    by_ids = await client.call(stream_call(prompt_ids=ids))
    assert by_text.events == by_ids.events
    assert by_text.finished.prompt_tokens == len(ids)


async def test_S1_state_out_and_state_in_equal_one_unbroken_run(client: TritonClient) -> None:
    """A client that carries its own state, and one that lets the worker keep it."""
    whole = await client.call(stream_call(sampling=sampling(12)))
    for option in ("return_state", "keep_state"):
        first = await client.ask(encode_call(stream_call(sampling=sampling(5), **{option: True})))
        assert ("state" in first.tensors[-1]) == (option == "return_state")
        state = first.tensors[-1]["state"].tobytes() if option == "return_state" else None
        point = decode_resume(first.details["resume"])
        second = await client.call(stream_call(prompt_ids=(), sampling=sampling(7), resume=point, state=state))
        assert first.ids + second.ids == whole.ids
        scores = [token.logprob for token in whole.events if isinstance(token, TokenEvent)]
        assert [token.logprob for token in second.events if isinstance(token, TokenEvent)] == scores[5:]
        assert second.finished.cached_tokens == point.position == len(PROMPT) + 4


async def test_a_turn_that_began_elsewhere_goes_on(client: TritonClient) -> None:
    whole = await client.call(stream_call(return_state=True))
    rest = await client.call(stream_call(return_state=True, sampled_ids=tuple(whole.ids[:5])))
    assert [token.index for token in rest.events if isinstance(token, TokenEvent)] == [*range(6, 13)]
    assert rest.ids == whole.ids[5:]
    assert rest.finished.end_state is not None
    assert whole.finished.end_state is not None
    assert rest.finished.end_state.new_ids == whole.finished.end_state.new_ids == (*PROMPT, *whole.ids)


async def test_a_state_that_is_not_kept_is_asked_for_on_the_same_stream(client: TritonClient, engine: Engine) -> None:
    request = GenerationRequest(request_id="a", prompt_ids=PROMPT, sampling=sampling(seed=99), keep_state=True)
    end = run_one(engine, request).finished.end_state
    assert end is not None
    first = await client.ask(encode_call(stream_call(sampling=sampling(5, seed=98), return_state=True)))
    point = dataclasses.replace(decode_resume(first.details["resume"]), pending=None)
    state = first.tensors[-1]["state"].tobytes()
    call = stream_call(prompt_ids=(3,), resume=dataclasses.replace(point, state_id=state_id(state)), state=state)
    before = (await client.status()).states

    with pytest.raises(StateMissing):
        await client.call(call, with_state=False)
    by_bytes = await client.call(call)
    by_id = await client.call(call, with_state=False)
    assert by_id.events == by_bytes.events

    after = (await client.status()).states
    assert (after.num_misses - before.num_misses, after.num_hits - before.num_hits) == (1, 1)
    assert 0 < after.num_bytes <= after.max_bytes == 2**20


async def test_kept_states_are_bounded(client: TritonClient, triton: RunningTriton, loaded: LoadedNsm) -> None:
    room = 2**20 // loaded.model.state_spec.num_bytes
    calls = [stream_call(prompt_ids=(number,), sampling=sampling(1), keep_state=True) for number in range(room + 4)]
    for start in range(0, len(calls), 32):
        await asyncio.gather(*(client.call(call) for call in calls[start : start + 32]))
    states = (await client.status()).states
    assert states.num_bytes <= states.max_bytes
    assert states.num_evicted > 0

    async with httpx.AsyncClient(timeout=60.0) as http:

        async def is_published() -> bool:
            page = (await http.get(f"http://127.0.0.1:{triton.server.metrics_port}/metrics")).text
            values = dict(re.findall(r"^(nsm_worker_\w+){.*} (\S+)$", page, re.MULTILINE))
            names = ("nsm_worker_kept_state_bytes", "nsm_worker_states_evicted_total", "nsm_worker_state_hits_total")
            wanted = (states.num_bytes, states.num_evicted, states.num_hits)
            return [float(values.get(name, -1)) for name in names] == list(wanted)

        await eventually(is_published)


async def test_X22_refusals_are_errors_in_the_servers_metrics(tmp_path: Path, tiny_model_dir: Path) -> None:
    """Of Triton's own page, so with its real metrics: labels and counters of every kind that is published. The server
    is this test's own: of another the page may not have the calls of earlier tests yet.
    """
    with running_triton(tmp_path, tiny_model_dir) as server:
        async with TritonClient(server) as client, httpx.AsyncClient(timeout=60.0) as http:
            await check_figures(client, http, server)


async def check_figures(client: TritonClient, http: httpx.AsyncClient, server: RunningTriton) -> None:
    async def figures() -> dict[str, float]:
        page = (await http.get(f"http://127.0.0.1:{server.server.metrics_port}/metrics")).text
        lines = re.findall(r"^(nsm_worker_\w+)\{(.*)\} (\S+)$", page, re.MULTILINE)
        labels_of = re.compile(r'(?:le|outcome)="[^"]*"')
        return {" ".join((name, *labels_of.findall(labels))): float(value) for name, labels, value in lines}

    await client.call(stream_call(sampling=sampling(5)))
    with pytest.raises(InvalidRequest):
        await client.call(stream_call(prompt_ids=(10**6,), sampling=sampling(1)))

    async def is_published() -> bool:
        now = await figures()
        names = ('nsm_worker_calls_total outcome="length"', 'nsm_worker_calls_total outcome="invalid_request"')
        names += ('nsm_worker_time_to_first_token_seconds_bucket le="+Inf"', "nsm_worker_call_seconds_count")
        return [now.get(name, 0) for name in names] == [1, 1, 1, 1]

    await eventually(is_published)


async def test_T4_cancel_is_seen(client: TritonClient) -> None:
    with slow_steps():  # many endless streams would leave no time for the questions
        running = client.stream(encode_call(stream_call(sampling=sampling(ENDLESS))))
        waiting = [client.stream(encode_call(stream_call(sampling=sampling(ENDLESS)))) for _ in range(MAX_SLOTS)]
        tasks = [asyncio.ensure_future(anext(stream)) for stream in waiting]
        for _ in range(3):
            await anext(running)
        await wait_for_requests(client, 1 + len(waiting))  # gRPC waits for ever on a call that ends before it has begun
        for stream in (running, *waiting):
            stream.cancel()
        await wait_until_idle(client)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (await client.call(stream_call())).finished.reason is FinishReason.LENGTH


async def test_T4_a_clients_own_time_limit_ends_its_request(client: TritonClient) -> None:
    stream = client.stream(encode_call(stream_call(sampling=sampling(ENDLESS))), stream_timeout=0.3)
    with pytest.raises(grpc.aio.AioRpcError, match="Deadline Exceeded"):
        async for _ in stream:
            pass
    await wait_until_idle(client)


async def test_a_deadline_is_told_with_what_was_done(client: TritonClient) -> None:
    with pytest.raises(DeadlineExceeded, match="the deadline passed after"):
        await client.call(stream_call(sampling=sampling(ENDLESS), timeout_s=0.3))


BAD_CALLS: list[tuple[Tensors, type[Exception]]] = [
    ({}, InvalidRequest),
    (encode_call(stream_call(prompt_ids=(512,))), InvalidRequest),
    (encode_call(stream_call(sampling=sampling(logit_bias={512: 1.0}))), InvalidRequest),
    (encode_call(stream_call(keep_states_at=(9,))), InvalidRequest),
    ({"options": np.array([b"{"], dtype=np.object_)}, InvalidRequest),
    ({"text_input": np.array([b"\xff"], dtype=np.object_)}, InvalidRequest),
    ({"text_input": np.array([b"x"], dtype=np.object_), "state": np.zeros(3, np.uint8)}, InvalidRequest),
    ({"nothing": np.zeros(1, np.int32)}, EngineDead),  # Triton's own refusal
]


async def test_T6_errors_leave_the_others_alive(client: TritonClient) -> None:
    call = stream_call(sampling=sampling(200))
    alone = await client.call(call)
    beside = asyncio.create_task(client.call(call))
    for tensors, error in BAD_CALLS:
        with pytest.raises(error):
            await client.ask(tensors)
    assert (await beside).events == alone.events


async def test_R2_a_state_that_does_not_fit_is_refused(client: TritonClient) -> None:
    first = await client.ask(encode_call(stream_call(return_state=True)))
    state, point = first.tensors[-1]["state"].tobytes(), decode_resume(first.details["resume"])
    unnamed = dataclasses.replace(point, state_id=None)
    for resume, raw, error in (
        (dataclasses.replace(unnamed, fingerprint="another"), state, StateMismatch),
        (dataclasses.replace(unnamed, position=1), state, SnapshotCorrupt),
        (unnamed, state[:-1], SnapshotCorrupt),
        (dataclasses.replace(point, state_id="0" * 64), state, InvalidRequest),
    ):
        with pytest.raises(error):
            await client.call(stream_call(resume=resume, state=raw))


async def test_a_malformed_string_hurts_nobody(triton: RunningTriton, client: TritonClient) -> None:
    """A BYTES tensor whose length prefix lies is refused before it reaches the worker."""
    inputs = [service_pb2.ModelInferRequest.InferInputTensor(name="text_input", datatype="BYTES", shape=[1])]
    request = service_pb2.ModelInferRequest(model_name="nsm", inputs=inputs, raw_input_contents=[b"\xff\xff\xff\x7fx"])
    raw = triton_grpc.InferenceServerClient(triton.grpc_url)
    try:
        async for answer in raw._client_stub.ModelStreamInfer(iter([request])):
            assert answer.error_message
            break
    finally:
        await raw.close()
    assert (await client.call(stream_call())).finished.reason is FinishReason.LENGTH


async def test_overload_is_an_answer(client: TritonClient) -> None:
    async def is_full() -> bool:
        return (await client.status()).engine.num_waiting == QUEUE_LIMIT

    call = encode_call(stream_call(sampling=sampling(ENDLESS)))
    with slow_steps():
        streams = [client.stream(call) for _ in range(MAX_SLOTS + QUEUE_LIMIT)]
        tasks = [asyncio.ensure_future(anext(stream)) for stream in streams]
        await eventually(is_full)
        with pytest.raises(Overloaded) as caught:
            await client.call(stream_call())
        assert caught.value.retry_after_s == 1.0
        for stream in streams:
            stream.cancel()
        await wait_until_idle(client)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (await client.call(stream_call())).finished.reason is FinishReason.LENGTH


async def test_concurrent_streams_equal_their_solo_runs(client: TritonClient) -> None:
    calls = [
        stream_call(prompt_ids=PROMPT + tuple(range(number)), sampling=sampling(8 + number % 5, seed=number))
        for number in range(32)
    ]
    alone = [await client.call(call) for call in calls]
    together = await asyncio.gather(*(client.call(call) for call in calls))
    assert [answers.ids for answers in together] == [answers.ids for answers in alone]
    assert [answers.text for answers in together] == [answers.text for answers in alone]


async def test_only_the_outputs_asked_for_are_sent(triton: RunningTriton) -> None:
    async def requests() -> Any:
        tensor = triton_grpc.InferInput("text_input", [1], "BYTES")
        tensor.set_data_from_numpy(np.array([b"x"], dtype=np.object_))
        wanted = [triton_grpc.InferRequestedOutput("token_ids"), triton_grpc.InferRequestedOutput("finish_reason")]
        parameters = {"max_tokens": 3, "ignore_eos": True, "temperature": 0.5}
        yield {"model_name": "nsm", "inputs": [tensor], "outputs": wanted, "parameters": parameters}

    async with triton_grpc.InferenceServerClient(triton.grpc_url) as plain:
        result, error = await anext(plain.stream_infer(requests()))
    assert error is None
    assert len(result.as_numpy("token_ids")) == 3
    assert result.as_numpy("text_output") is None


async def test_the_worker_describes_itself(client: TritonClient, loaded: LoadedNsm, triton: RunningTriton) -> None:
    description = decode_description((await client.call(DescribeCall())).tensors[0])
    assert description.model == loaded.info
    assert (description.max_slots, description.queue_limit) == (MAX_SLOTS, QUEUE_LIMIT)
    assert tokenizer_from_json(description.tokenizer).fingerprint == loaded.tokenizer.fingerprint
    report = decode_report((await client.call(InspectCall())).tensors[0])
    assert (report.position, len(report.layers)) == (0, 2)
    assert (await client.status()).is_ready


async def test_generate_over_http(triton: RunningTriton, client: TritonClient) -> None:
    """What `curl -d '{"text_input": …}' …/generate` gets."""
    body = {
        "text_input": "It was é",
        "max_tokens": 6,
        "temperature": 0.5,
        "seed": 3,
        "parameters": {"ignore_eos": True},
    }
    parameters = {"max_tokens": 6, "temperature": 0.5, "seed": 3, "ignore_eos": True}
    text = {"text_input": np.array(["It was é".encode()], dtype=np.object_)}
    wanted = await client.ask(text, parameters=parameters)
    async with httpx.AsyncClient(base_url=f"{triton.http_url}/v2/models/nsm", timeout=60.0) as http:
        response = await http.post("/generate", json={**body, "id": "mine"})
        assert response.status_code == 200, response.text
        answer = response.json()
        assert (answer["text_output"], answer["token_ids"]) == (wanted.text, wanted.ids)
        assert (answer["finish_reason"], answer["id"]) == ("length", "mine")
        assert json.loads(answer["details"])["completion_tokens"] == 6

        assert re.search("is_ready...true", (await http.post("/generate", json={"op": "status"})).text)  # the probe

        response = await http.post("/generate", json={**body, "temperature": 9})
        assert response.status_code == 400
        assert response.json()["error"].startswith("invalid_request: temperature must be in [0, 2]")


async def test_generate_stream_over_http(triton: RunningTriton) -> None:
    body = {"text_input": "It was", "max_tokens": 6, "seed": 3, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=f"{triton.http_url}/v2/models/nsm", timeout=60.0) as http:
        whole = (await http.post("/generate", json=body)).json()
        response = await http.post("/generate_stream", json={**body, "stream": True})
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [json.loads(line.removeprefix("data:")) for line in response.text.splitlines() if line]
        assert "".join(event["text_output"] for event in events) == whole["text_output"]
        assert len(events) > 2
        assert [event.get("finish_reason") for event in events] == [*[None] * (len(events) - 1), "length"]

        response = await http.post("/generate_stream", json={**body, "top_p": 0})
        assert "invalid_request: top_p" in response.text


async def test_what_http_makes_of_statuses_and_numbers(triton: RunningTriton) -> None:
    """Triton's own doing, as docs/triton.md tells it."""
    body = {"text_input": "It was", "max_tokens": 3, "seed": 3, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=f"{triton.http_url}/v2/models/nsm", timeout=60.0) as http:
        response = await http.post("/generate", json={**body, "timeout_s": 1e-6})  # CANCELLED over gRPC
        assert (response.status_code, response.json()["error"].split(":")[0]) == (400, "deadline_exceeded")
        response = await http.post("/generate", json={**body, "stream": True})
        assert (response.status_code, "error" in response.json()) == (200, True)
        response = await http.post("/generate_stream", json={**body, "top_p": 0})
        assert (response.status_code, "invalid_request: top_p" in response.text) == (400, True)
        late = {**body, "max_tokens": ENDLESS, "stream": True, "timeout_s": 0.3}
        response = await http.post("/generate_stream", json=late)
        assert (response.status_code, "deadline_exceeded: " in response.text) == (200, True)
        ids = (await http.post("/generate", json={**body, "max_tokens": 1})).json()["token_ids"]
        assert isinstance(ids, int)
        cut = {"input_ids": [2**40 + 5], "max_tokens": 3, "seed": 3, "ignore_eos": True}
        whole = [(await http.post("/generate", json={**cut, "input_ids": [n]})).json() for n in (5, 2**40 + 5)]
        assert whole[0]["token_ids"] == whole[1]["token_ids"]


async def test_a_carried_state_survives_json(triton: RunningTriton) -> None:
    """UINT8 is a list of numbers there: also a client of HTTP can keep its state."""
    body = {"input_ids": list(PROMPT), "seed": 3, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=f"{triton.http_url}/v2/models/nsm", timeout=60.0) as http:
        whole = (await http.post("/generate", json={**body, "max_tokens": 6})).json()
        first = (await http.post("/generate", json={**body, "max_tokens": 2, "return_state": True})).json()
        options = json.dumps({"resume": json.loads(first["details"])["resume"]})
        rest = {"text_input": "", "seed": 3, "ignore_eos": True, "max_tokens": 4, "options": options}
        second = (await http.post("/generate", json={**rest, "state": first["state"]})).json()
    assert first["token_ids"] + second["token_ids"] == whole["token_ids"]


async def test_a_decoder_refuses_what_is_no_answer(client: TritonClient) -> None:
    call = stream_call()
    status = await client.ask(encode_call(DescribeCall()))
    with pytest.raises(EngineDead):
        EventDecoder(call).decode(status.tensors[0])
