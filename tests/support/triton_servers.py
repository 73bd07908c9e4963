"""Real Triton servers on loopback, and a client that speaks the contract to them over gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc.aio as triton_grpc

from nsm_core.engine.request import Event, Finished
from nsm_core.tokenizer import Tokenizer
from nsm_core.triton.supervisor import SHARED_MEMORY, children_of, free_regions, stubs_of
from nsm_core.wire.call_tensors import encode_call
from nsm_core.wire.calls import Call, GenerateCall, StatusCall
from nsm_core.wire.description import WorkerStatus, decode_status
from nsm_core.wire.errors import decode_failure
from nsm_core.wire.tensors import Tensors
from service.backends.triton.dev_server import InstanceGroup, TritonServer, default_home, write_repository
from tests.support.event_decoder import EventDecoder
from tests.support.models import save_small_model
from tests.support.redis_servers import die_with_the_tests, free_port

ROOT = Path(__file__).resolve().parents[2]
START_S = 180.0
MODEL = "nsm"
MAX_SLOTS, QUEUE_LIMIT = 8, 40
SLOWED = f"""
import sys
sys.path.append({str(ROOT)!r})
from tests.support.slow_steps import slow_down
slow_down()
"""
DATATYPES = {"O": "BYTES", "i": "INT32", "u": "UINT8"}


class RunningTriton:
    """One server and its supervisor. `parameters`: of the model's configuration."""

    def __init__(self, directory: Path, parameters: Mapping[str, str], instances: InstanceGroup | None = None) -> None:
        ports = [free_port() for _ in range(3)]
        self.server = TritonServer(
            home=default_home(),
            repository=directory / "repository",
            http_port=ports[0],
            grpc_port=ports[1],
            metrics_port=ports[2],
        )
        self.log = directory / "triton.log"
        self._process: subprocess.Popen[bytes] | None = None
        write_repository(self.server.repository, parameters, instances=instances or InstanceGroup())
        with (self.server.repository / MODEL / "1" / "model.py").open("a") as model:
            model.write(SLOWED)

    @property
    def grpc_url(self) -> str:
        return f"127.0.0.1:{self.server.grpc_port}"

    @property
    def http_url(self) -> str:
        return f"http://127.0.0.1:{self.server.http_port}"

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    def start(self) -> None:
        """As `nsm triton serve` starts it, under a supervisor; returns when the model is loaded."""
        supervisor = [sys.executable, "-m", "nsm_core.triton.supervisor", f"--prefix={self.server.region_prefix}"]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*supervisor, *self.server.command()],
                cwd=ROOT,
                env=self.server.environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=die_with_the_tests,
            )
        wait_until(self._is_loaded, "the start of tritonserver")

    def _is_loaded(self) -> bool:
        if self.process.poll() is not None:
            raise RuntimeError(f"tritonserver ended:\n{self.log.read_text(errors='replace')}")
        try:
            return httpx.get(f"{self.http_url}/v2/models/{MODEL}/ready", verify=False).status_code == 200
        except httpx.TransportError:
            return False

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def server_pid(self) -> int:
        """Of tritonserver itself."""
        return children_of(self.process.pid)[0]

    @property
    def stub_pid(self) -> int:
        """Of the process that runs the model."""
        (stub,) = stubs_of(self.server_pid)[0]
        return stub

    def shared_memory(self) -> dict[str, int]:
        """Bytes of each region of this server."""
        return {path.name: path.stat().st_size for path in SHARED_MEMORY.glob(f"{self.server.region_prefix}*")}

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(START_S)

    def kill(self) -> None:
        """kill -9 of the supervisor, with which the server dies; its stub notices by itself."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def wait_until(condition: Callable[[], bool], what: str, *, seconds: float = START_S) -> None:
    """Polls: there is nothing to await in another program's doings."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what} did not happen within {seconds:g} s")
        time.sleep(0.05)


async def eventually(condition: Callable[[], Awaitable[bool]], *, seconds: float = 60.0) -> None:
    """Asks again and again."""
    async with asyncio.timeout(seconds):
        while not await condition():  # noqa: ASYNC110  # nobody in another process sets an event
            await asyncio.sleep(0.02)


@dataclasses.dataclass
class Answers:
    """What came for one call."""

    events: list[Event] = dataclasses.field(default_factory=list)
    tensors: list[Tensors] = dataclasses.field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        return [token_id for tensors in self.tensors for token_id in tensors.get("token_ids", np.array([])).tolist()]

    @property
    def text(self) -> str:
        return "".join(tensors["text_output"][0].decode() for tensors in self.tensors)

    @property
    def details(self) -> dict[str, Any]:
        """Of the last answer."""
        details: dict[str, Any] = json.loads(self.tensors[-1]["details"][0])
        return details

    @property
    def finished(self) -> Finished:
        assert isinstance(self.events[-1], Finished)
        return self.events[-1]


class TritonClient:
    """`async with` it. Each call has a stream of its own on one channel, as a gateway's would."""

    def __init__(self, server: RunningTriton) -> None:
        self._url = server.grpc_url
        self._client: Any = None

    async def __aenter__(self) -> TritonClient:
        self._client = triton_grpc.InferenceServerClient(self._url)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    def stream(self, *requests: Tensors, parameters: Mapping[str, Any] | None = None, **options: Any) -> Any:
        """tritonclient's own iterator over (result, error), which has `cancel`."""

        async def each() -> AsyncIterator[dict[str, Any]]:
            for tensors in requests:
                yield {
                    "model_name": MODEL,
                    "inputs": [_input(name, array) for name, array in tensors.items()],
                    "parameters": dict(parameters or {}),
                    "enable_empty_final_response": True,
                }

        return self._client.stream_infer(each(), **options)

    async def answers(self, *requests: Tensors, **options: Any) -> AsyncIterator[Tensors]:
        """The tensors of each answer. Raises what the worker meant by an error."""
        open_requests = len(requests)
        async for result, error in self.stream(*requests, **options):
            if error is not None:
                raise decode_failure(error.message()).error
            response = result.get_response()
            yield {output.name: result.as_numpy(output.name) for output in response.outputs}
            open_requests -= response.parameters["triton_final_response"].bool_param
            if not open_requests:
                return

    async def ask(self, tensors: Tensors, **options: Any) -> Answers:
        """All answers to one request."""
        return Answers(tensors=[answer async for answer in self.answers(tensors, **options)])

    async def call(self, call: Call, *, with_state: bool = True) -> Answers:
        """All answers to a call, decoded where it is a stream."""
        answers = await self.ask(encode_call(call, with_state=with_state))
        if isinstance(call, GenerateCall) and call.stream:
            decoder = EventDecoder(call)
            answers.events = [event for tensors in answers.tensors for event in decoder.decode(tensors)]
        return answers

    async def status(self) -> WorkerStatus:
        return decode_status((await self.call(StatusCall())).tensors[0])


def _input(name: str, array: np.ndarray[Any, Any]) -> Any:
    tensor = triton_grpc.InferInput(name, list(array.shape), DATATYPES[array.dtype.kind])
    tensor.set_data_from_numpy(array)
    return tensor


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Tokenizer) -> Path:
    return save_small_model(tmp_path_factory.mktemp("tiny-model"), tiny_tokenizer)


@pytest.fixture(scope="session")
def triton(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Iterator[RunningTriton]:
    """A server for tests that leave it as it was."""
    with running_triton(tmp_path_factory.mktemp("triton"), tiny_model_dir) as server:
        yield server


@contextlib.contextmanager
def running_triton(
    directory: Path, model_dir: Path, *, instances: InstanceGroup | None = None, **parameters: str
) -> Iterator[RunningTriton]:
    defaults = {
        "model": str(model_dir),
        "num_threads": "1",
        "max_slots": str(MAX_SLOTS),
        "queue_limit": str(QUEUE_LIMIT),
        "kept_states_mb": "1",
    }
    server = RunningTriton(directory, {**defaults, **parameters}, instances)
    try:
        server.start()
        yield server
    finally:
        server.kill()
        free_regions(server.server.region_prefix)


@pytest.fixture
async def client(triton: RunningTriton) -> AsyncIterator[TritonClient]:
    async with TritonClient(triton) as client:
        yield client
