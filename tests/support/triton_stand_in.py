"""A worker of the contract behind a gRPC server in the test's own loop: a Triton that breaks on demand."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from nsm_core.engine.request import Finished, FinishReason
from nsm_core.errors import NsmError
from nsm_core.model.loader import LoadedNsm
from nsm_core.tokenizer import Tokenizer
from nsm_core.triton.worker import Worker
from nsm_core.wire.call_tensors import encode_call
from nsm_core.wire.calls import PostCall
from nsm_core.wire.errors import Failure, encode_failure
from nsm_core.wire.link import (
    LinkStep,
    Start,
    decode_to_gateway,
    decode_to_worker,
    encode_to_gateway,
    encode_to_worker,
)
from nsm_core.wire.local import Step
from nsm_core.wire.tensors import Tensors, bytes_array
from service.backends.triton import generation as triton_generation
from service.backends.triton import upstream as triton_upstream
from service.backends.triton.backend import TritonBackend
from tests.nsm_core.triton.fake_triton import worker_config
from tests.support.models import RandomModel, as_loaded
from tests.support.redis_servers import free_port

MAX_SLOTS, QUEUE_LIMIT = 2, 3
DATATYPES = {"O": "BYTES", "i": "INT32", "u": "UINT8"}


def random_loaded(tokenizer: Tokenizer, *, fingerprint: str = "stand-in", numerics: str = "cpu/fp32/test") -> LoadedNsm:
    return as_loaded(RandomModel(), tokenizer, fingerprint=fingerprint, numerics=numerics)


@dataclasses.dataclass(frozen=True)
class Answer:
    """`error`: instead of tensors."""

    tensors: Tensors
    error: str = ""
    is_last: bool = True


class QueueResponder:
    """From the worker's thread to the loop."""

    def __init__(self) -> None:
        self.has_left = False
        self._loop = asyncio.get_running_loop()
        self._answers: asyncio.Queue[Answer] = asyncio.Queue()

    def send(self, tensors: Tensors, *, is_last: bool) -> None:
        self._loop.call_soon_threadsafe(self._answers.put_nowait, Answer(tensors, is_last=is_last))

    def fail(self, failure: Failure) -> None:
        self._loop.call_soon_threadsafe(self._answers.put_nowait, Answer({}, error=encode_failure(failure)))

    def close(self) -> None:
        self.send({}, is_last=True)

    def is_cancelled(self) -> bool:
        return self.has_left

    async def answers(self) -> AsyncIterator[Answer]:
        while True:
            answer = await self._answers.get()
            yield answer
            if answer.is_last:
                return


class StandIn(service_pb2_grpc.GRPCInferenceServiceServicer):
    """One server, `start` and `stop`, which may be started again at the same address.

    `break_after`: a link breaks after so many answers with events. `fail_with`: all requests are answered with it.
    `is_hung`: nothing is answered any more; `is_mute`: only heartbeats are; `is_unloading`: only
    links that run are; with `refuses_words` these hear nothing either. `opens_links`: else a link never
    opens. `options`: what requests asked for, in order;
    `state_sizes`: bytes of states that came along; `operations`: what was asked; `credentials`: TLS,
    from the next start on.
    """

    def __init__(self, loaded: LoadedNsm, **config: Any) -> None:
        limits = {"max_slots": MAX_SLOTS, "queue_limit": QUEUE_LIMIT, "token_budget": 32, "drain_s": 0.0}
        self.config = worker_config(**{**limits, **config})
        self.loaded = loaded
        self.url = f"127.0.0.1:{free_port()}"
        self.break_after: int | None = None
        self.fail_with: NsmError | None = None
        self.is_hung = self.is_mute = self.is_unloading = False
        self.refuses_words = False
        self.opens_links = True
        self.options: list[dict[str, Any]] = []
        self.state_sizes: list[int] = []
        self.operations: list[str] = []
        self.credentials: grpc.ServerCredentials | None = None
        self._links: dict[str, asyncio.Queue[Any]] = {}  # their answers
        self._worker: Worker | None = None
        self._server: Any = None

    @property
    def worker(self) -> Worker:
        assert self._worker is not None
        return self._worker

    async def start(self) -> None:
        self._worker = Worker(self.loaded, self.config)
        self._worker.start()
        self._server = grpc.aio.server()
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        if self.credentials is None:
            assert self._server.add_insecure_port(self.url)
        else:
            assert self._server.add_secure_port(self.url, self.credentials)
        await self._server.start()

    async def stop(self, *, grace_s: float | None = None) -> None:
        """At once, as kill -9 does it, or with time for streams to end."""
        if self._worker is not None:
            worker, self._worker = self._worker, None
            stopping = asyncio.create_task(asyncio.to_thread(worker.stop))
            if grace_s is None:
                await self._server.stop(None)
            await stopping
            await self._server.stop(grace_s)

    async def ModelStreamInfer(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        """Requests of one stream are answered side by side, as Triton does it."""
        answers: asyncio.Queue[Any] = asyncio.Queue()
        tasks: set[asyncio.Task[None]] = set()

        async def read() -> None:
            async for request in request_iterator:
                tasks.add(asyncio.create_task(self._answer_into(answers, request, context)))
            await asyncio.gather(*tasks)
            answers.put_nowait(None)

        reading = asyncio.create_task(read())
        try:
            while (answer := await answers.get()) is not None:
                if isinstance(answer, str):
                    await context.abort(grpc.StatusCode.UNAVAILABLE, answer)
                yield answer
        finally:
            for task in (reading, *tasks):
                task.cancel()
            await asyncio.gather(reading, *tasks, return_exceptions=True)

    async def _answer_into(self, answers: asyncio.Queue[Any], request: Any, context: Any) -> None:
        """A string there ends the stream."""
        tensors: Tensors = _read(request)
        call_id = request.id
        options = json.loads(tensors["options"][0])
        operation, is_linked = options["op"], options["op"] == "link"
        self.operations.append(operation)
        if operation == "post" and not self.refuses_words:
            tensors = self._note_posted(tensors, options)
        if operation == "generate":
            self.options.append(options)
            if self.is_mute:
                return
            if self.fail_with is not None:
                answers.put_nowait(_written(Answer({}, error=encode_failure(Failure(error=self.fail_with)))))
                return
        if self._worker is None:
            answers.put_nowait("stopped by the test")
            return
        if is_linked and not self.opens_links:
            return
        if is_linked:
            self._links[options["link"]] = answers
        async for response in self._answer(tensors, is_heard=operation == "post" and not self.refuses_words):
            response.infer_response.id = call_id
            answers.put_nowait(response)
            if is_linked and self._has_events(response) and self._is_to_break():
                answers.put_nowait("broken by the test")

    def _is_to_break(self) -> bool:
        """After this answer with events."""
        if self.break_after is not None:
            self.break_after -= 1
        is_it = self.break_after == 0
        if is_it:
            self.break_after = None
        return is_it

    @staticmethod
    def _has_events(response: Any) -> bool:
        raws = response.infer_response.raw_output_contents
        return bool(raws) and isinstance(decode_to_gateway(raws[0]), LinkStep)

    def _note_posted(self, tensors: Tensors, options: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
        """The call, without the requests that are answered by the test."""
        messages = decode_to_worker(tensors["messages"].tobytes())
        passed = []
        for message in messages:
            if isinstance(message, Start):
                encoded = encode_call(message.call)
                self.options.append(json.loads(encoded["options"][0]))
                self.state_sizes.append(encoded["state"].size if "state" in encoded else 0)
                if self.is_mute:
                    continue
                if self.fail_with is not None:
                    end = Finished(reason=FinishReason.ERROR, error=self.fail_with)
                    step = Step(b"", b"", b"", b"", [], [], [], [], [(message.number, end)], 0)
                    tensor = {"messages": bytes_array(encode_to_gateway(LinkStep(step, [], [])))}
                    self._links[options["link"]].put_nowait(_written(Answer(tensor)))
                    continue
            passed.append(message)
        return encode_call(PostCall(options["link"], options["number"], encode_to_worker(passed)))

    async def _answer(self, tensors: Tensors, *, is_heard: bool) -> AsyncIterator[Any]:
        if self.is_unloading and not is_heard:
            words = "Request for unknown model: 'nsm' has no available versions"  # Triton's own
            yield service_pb2.ModelStreamInferResponse(error_message=words)
            return
        if self.is_hung:
            await asyncio.Event().wait()
        responder = QueueResponder()
        self.worker.accept(tensors, {}, responder)
        try:
            async for answer in responder.answers():
                if self.is_hung:
                    await asyncio.Event().wait()
                if answer.tensors or answer.error:
                    yield _written(answer)
        finally:
            responder.has_left = True
            if self._worker is not None:
                self._worker.cancel_abandoned()


@contextlib.asynccontextmanager
async def stand_ins(*servers: StandIn) -> AsyncIterator[None]:
    try:
        for server in servers:
            await server.start()
        yield
    finally:
        for server in servers:
            await server.stop()


def _read(request: Any) -> dict[str, np.ndarray[Any, Any]]:
    dtypes = {"INT32": np.int32, "UINT8": np.uint8}
    tensors = {}
    for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        is_text = tensor.datatype == "BYTES"
        tensors[tensor.name] = np.array([raw[4:]], object) if is_text else np.frombuffer(raw, dtypes[tensor.datatype])
    return tensors


def _written(answer: Answer) -> Any:
    response = service_pb2.ModelStreamInferResponse(error_message=answer.error)
    for name, array in answer.tensors.items():
        is_text = array.dtype.kind == "O"
        raw = len(array[0]).to_bytes(4, "little") + array[0] if is_text else array.tobytes()
        response.infer_response.outputs.add(name=name, datatype=DATATYPES[array.dtype.kind], shape=array.shape)
        response.infer_response.raw_output_contents.append(raw)
    return response


@contextlib.asynccontextmanager
async def running_backend(*servers: StandIn, **options: Any) -> AsyncIterator[TritonBackend]:
    """A gateway's backend on them."""
    backend = TritonBackend([server.url for server in servers], **{"wait_s": 60.0, **options})
    await backend.start()
    try:
        yield backend
    finally:
        await backend.stop()


async def is_up(backend: TritonBackend, number: int) -> bool:
    """Whether so many of its servers are."""
    return sum(upstream.is_up for upstream in backend.upstreams) == number


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend's waits are shorter than in production."""
    monkeypatch.setattr(triton_upstream, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(triton_upstream, "ANSWER_S", 1.5)
    monkeypatch.setattr(triton_upstream, "RETRY_MIN_S", 0.05)
    monkeypatch.setattr(triton_generation, "SERVER_WAIT_S", 0.5)
    monkeypatch.setattr(triton_generation, "FULL_S", 0.2)
    monkeypatch.setattr(triton_generation, "DEADLINE_GRACE_S", 0.1)
