"""The gRPC connection to one Triton server, and its streams of calls."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2, service_pb2_grpc

from nsm_core.errors import DeadlineExceeded, EngineDead
from nsm_core.wire.errors import Failure, decode_failure, reading_answer
from nsm_core.wire.tensors import Tensors
from service.addresses import is_loopback_url
from service.backends.triton.tls import TritonTls, explained, is_unexplained

MODEL = "nsm"
UNLOADING = "has no available versions"  # what Triton says of a model whose last streams may still run
FINISH_S = 2.0  # for the server to end a stream of which all calls have their last answers
LENGTH_BYTES = 4  # in front of each string of a BYTES tensor
_OPTIONS = (
    ("grpc.max_send_message_length", -1),  # a state has megabytes
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),  # gRPC's own two minutes are longer than a server takes to come back
    ("grpc.use_local_subchannel_pool", 1),  # channels of one process to one server do not share their connection
)
_DATATYPES = {"O": "BYTES", "i": "INT32", "u": "UINT8"}
_DTYPES: Mapping[str, np.dtype[Any]] = {"INT32": np.dtype("<i4"), "UINT8": np.dtype("u1")}


class CallFailed(Exception):
    """The worker refused the call or gave it up; another server would do the same. EngineDead is raised as itself."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure.error))
        self.failure = failure


class ServerStopping(EngineDead):
    """The server takes no new call and lets its streams end."""


class Unreached(EngineDead):
    """No address of the server took the connection, and the error explains one only."""


class TritonChannel:
    """To be made on the event loop that uses it."""

    def __init__(self, url: str, *, tls: TritonTls | None = None) -> None:
        """`url`: host:port; `tls`: None for a connection in the clear. Nothing is connected yet."""
        options = (*_OPTIONS, ("grpc.enable_http_proxy", 0)) if is_loopback_url(url) else _OPTIONS
        if tls is None:
            self._channel = grpc.aio.insecure_channel(url, options=options)
        else:
            self._channel = grpc.aio.secure_channel(url, tls.credentials(), options=(*options, *tls.options()))
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def open(self, *, timeout_s: float | None, instance: str | None = None) -> TritonStream:
        """A stream of calls, which ends after `timeout_s` whatever the server does. `instance`: the one that gets the
        calls; None for any.
        """
        return TritonStream(self._stub.ModelStreamInfer(timeout=timeout_s), instance)

    async def ask(self, tensors: Tensors, *, timeout_s: float, instance: str | None = None) -> Tensors:
        """The first answer to a call. Raises what `TritonStream.receive` raises."""
        stream = self.open(timeout_s=timeout_s, instance=instance)
        try:
            await stream.send(tensors)
            answer = await stream.receive()
            await stream.finish()
            return answer
        except CallFailed:
            await stream.finish()
            raise
        finally:
            stream.cancel()

    async def close(self) -> None:
        """Streams that are still open break."""
        await self._channel.close()


class TritonStream:
    """Calls and their answers. Whoever leaves it calls `cancel`; the worker soon notices."""

    def __init__(self, call: Any, instance: str | None) -> None:
        self._call, self._instance = call, instance
        self.refused_id = ""  # of the call that the last error was an answer to; none where the stream broke
        self._is_over = asyncio.Event()
        call.add_done_callback(lambda _: self._is_over.set())

    async def send(self, tensors: Tensors, *, call_id: str = "") -> None:
        """Raises what `receive` raises."""
        try:
            await self._write(_request(tensors, call_id, self._instance))
        except asyncio.InvalidStateError as error:  # it is over already: the next `receive` tells why
            raise EngineDead("the connection to the Triton server broke") from error
        except grpc.aio.AioRpcError as error:
            raise _loss(error) from error

    async def _write(self, request: Any) -> None:
        """gRPC's own `write` waits for ever when a call ends before its first bytes were sent."""
        writing = asyncio.create_task(self._call.write(request))
        ending = asyncio.create_task(self._is_over.wait())
        try:
            await asyncio.wait((writing, ending), return_when=asyncio.FIRST_COMPLETED)
            if not writing.done():
                await self._call.read()  # raises why it ended
                raise asyncio.InvalidStateError
            await writing
        finally:
            writing.cancel()
            ending.cancel()

    async def receive(self) -> Tensors:
        """The next answer. Raises CallFailed; EngineDead where another server may do better; DeadlineExceeded.

        ServerStopping, an EngineDead too, says nothing against streams that run.
        """
        self.refused_id = ""
        try:
            response = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise _loss(error) from error
        if response is grpc.aio.EOF:
            raise EngineDead("the Triton server ended a stream without a last answer")
        if response.error_message:
            self.refused_id = response.infer_response.id
            if UNLOADING in response.error_message:
                raise ServerStopping("it is stopping")
            failure = decode_failure(response.error_message)
            raise failure.error if isinstance(failure.error, EngineDead) else CallFailed(failure)
        return _tensors(response.infer_response)

    async def end_calls(self) -> None:
        """No more are sent; the server ends the stream after its last answer. Whatever breaks, `receive` tells."""
        with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
            await self._call.done_writing()

    async def finish(self) -> None:
        """Lets the server end it, after the last answer.

        A call that is cancelled just then may stay in Triton 2.51 for ever, and with it the model, so that the server
        does not stop before its time-out.
        """
        with contextlib.suppress(TimeoutError, asyncio.InvalidStateError, grpc.aio.AioRpcError):
            async with asyncio.timeout(FINISH_S):
                await self._call.done_writing()
                while await self._call.read() is not grpc.aio.EOF:
                    pass

    def cancel(self) -> None:
        """Idempotent, also after the end."""
        self._call.cancel()


def _request(tensors: Tensors, call_id: str, instance: str | None) -> Any:
    request = service_pb2.ModelInferRequest(model_name=MODEL, id=call_id)
    if instance is not None:
        request.parameters["instance"].string_param = instance
    for name, array in tensors.items():
        request.inputs.add(name=name, datatype=_DATATYPES[array.dtype.kind], shape=array.shape)
        request.raw_input_contents.append(_raw(array))
    return request


def _raw(array: NDArray[Any]) -> bytes:
    if array.dtype.kind == "O":  # strings are one to a tensor in this contract
        text: bytes = array[0]
        return len(text).to_bytes(LENGTH_BYTES, "little") + text
    return array.tobytes()


def _tensors(response: Any) -> Tensors:
    with reading_answer():
        outputs = zip(response.outputs, response.raw_output_contents, strict=True)
        return {output.name: _array(output.datatype, raw) for output, raw in outputs}


def _array(datatype: str, raw: bytes) -> NDArray[Any]:
    if datatype == "BYTES":
        return np.array([raw[LENGTH_BYTES:]], dtype=np.object_)
    return np.frombuffer(raw, dtype=_DTYPES[datatype])


def _loss(error: Any) -> EngineDead | DeadlineExceeded:
    code = error.code()
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded("the Triton server did not answer in time")
    details = error.details()
    kind = Unreached if is_unexplained(details) else EngineDead
    return kind(f"the connection to the Triton server broke: {code.name.lower()}: {explained(details)}")
