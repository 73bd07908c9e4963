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

from nsm_core.model.loader import LoadedNsm
from nsm_core.tokenizer import Tokenizer
from nsm_core.triton.worker import Worker
from nsm_core.wire.errors import Failure, encode_failure
from nsm_core.wire.tensors import Tensors
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

    `break_after`: the next stream of text breaks after so many answers. `fail_with`: all are answered with it.
    `is_hung`: nothing is answered any more; `is_mute`: only heartbeats are; `is_unloading`: only
    streams that run are. `options`: what calls asked for, in order;
    `state_sizes`: bytes of states that came along; `traces`: what was asked, and of which trace; `credentials`: TLS,
    from the next start on.
    """

    def __init__(self, loaded: LoadedNsm, **config: Any) -> None:
        limits = {"max_slots": MAX_SLOTS, "queue_limit": QUEUE_LIMIT, "token_budget": 32, "drain_s": 0.0}
        self.config = worker_config(**{**limits, **config})
        self.loaded = loaded
        self.url = f"127.0.0.1:{free_port()}"
        self.break_after: int | None = None
        self.fail_with: Exception | None = None
        self.is_hung = self.is_mute = self.is_unloading = False
        self.options: list[dict[str, Any]] = []
        self.state_sizes: list[int] = []
        self.traces: list[tuple[str, str | None]] = []
        self.credentials: grpc.ServerCredentials | None = None
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
        async for request in request_iterator:
            tensors = _read(request)
            options = json.loads(tensors["options"][0])
            is_text = options["op"] == "generate"
            self.traces.append((options["op"], dict(context.invocation_metadata()).get("traceparent")))
            if self._worker is None:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "stopped by the test")
            if is_text:
                self.options.append(options)
                self.state_sizes.append(tensors["state"].size if "state" in tensors else 0)
            async for number, response in self._answer(tensors, is_text=is_text):
                yield response
                if is_text and number == self.break_after:
                    self.break_after = None
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "broken by the test")

    async def _answer(self, tensors: Tensors, *, is_text: bool) -> AsyncIterator[tuple[int, Any]]:
        if self.is_unloading:
            words = "Request for unknown model: 'nsm' has no available versions"  # Triton's own
            yield 1, service_pb2.ModelStreamInferResponse(error_message=words)
            return
        if self.is_hung or (self.is_mute and is_text):
            await asyncio.Event().wait()
        if is_text and self.fail_with is not None:
            yield 1, service_pb2.ModelStreamInferResponse(error_message=encode_failure(Failure(error=self.fail_with)))
            return
        responder, number = QueueResponder(), 0
        self.worker.accept(tensors, {}, responder)
        try:
            async for answer in responder.answers():
                number += 1
                if self.is_hung:
                    await asyncio.Event().wait()
                yield number, _written(answer)
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
    backend = TritonBackend([server.url for server in servers], **{"wait_s": 5.0, **options})
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
