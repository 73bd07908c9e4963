"""The instances of a model in one Triton server: each is a process, and Triton gives a call to any of them.

A call that names an instance is handed on to it over a Unix socket if it comes to another one. So a gateway's link, its
requests and the states that they leave are with one instance.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from nsm_core.errors import EngineDead
from nsm_core.triton.responder import Responder
from nsm_core.wire.errors import Failure, decode_failure, encode_failure
from nsm_core.wire.tensors import Tensors, refuse

LENGTH_BYTES = 4
Accept = Callable[[Tensors, Mapping[str, Any], Responder], None]


class PackedTensor(msgspec.Struct, array_like=True):
    """`dtype`: as numpy names it; `O` for one string."""

    dtype: str
    shape: tuple[int, ...]
    raw: bytes


class HandedCall(msgspec.Struct, tag=True, array_like=True):
    """A call as it came."""

    tensors: dict[str, PackedTensor]
    parameters: dict[str, Any]


class HandedAnswer(msgspec.Struct, tag=True, array_like=True):
    """One answer; `failure`: a line instead of tensors. Without either nothing more is said."""

    tensors: dict[str, PackedTensor]
    is_last: bool
    failure: str | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[HandedCall | HandedAnswer] = msgspec.msgpack.Decoder(HandedCall | HandedAnswer)


class Instances:
    """What one instance knows of itself and the others of its server. Its methods belong to one event loop.

    `name`: its own; `directory`: of the sockets of all, see `directory_of`; `accept`: takes a call.
    """

    def __init__(self, name: str, directory: Path, accept: Accept) -> None:
        self.name = name
        self.relays: set[Relay] = set()
        self._directory, self._accept = directory, accept
        self._server: asyncio.Server | None = None
        self._served: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def start(self) -> None:
        """Calls of the others are taken from now on."""
        _remove_leftovers(self._directory.parent)
        self._directory.mkdir(mode=0o700, exist_ok=True)
        path = self._path(self.name)
        path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._take, path)

    def stop_listening(self) -> None:
        """No new call is taken; those under way go on."""
        if self._server is not None:
            self._server.close()
            self._path(self.name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # others are still there
                self._directory.rmdir()

    async def close(self, timeout_s: float) -> None:
        """Closes the connections: after their last answers, or at once if those are not read within `timeout_s`."""
        for writer in self._served.values():
            writer.close()
        if self._served:
            await asyncio.wait(self._served, timeout=timeout_s)
        for writer in self._served.values():
            writer.transport.abort()
        if self._served:
            await asyncio.wait(self._served)

    def names(self) -> tuple[str, ...]:
        """Of all instances that take calls, in rising order."""
        with contextlib.suppress(FileNotFoundError):  # the last one has stopped
            return tuple(sorted(path.name for path in self._directory.iterdir()))
        return ()

    async def hand_on(self, name: str, tensors: Tensors, parameters: Mapping[str, Any], responder: Responder) -> None:
        """Gives a call to another instance, and its answers to the responder. Raises InvalidRequest, EngineDead."""
        names = self.names()
        if self.name not in names:  # the others do so too
            raise EngineDead("the worker is stopping")
        if name not in names:
            refuse("instance", f"one of {', '.join(names)}", name)
        try:
            reader, writer = await asyncio.open_unix_connection(self._path(name))
        except OSError as error:
            raise EngineDead(f"the instance {name} does not answer: {error.strerror}") from error
        relay = Relay(responder, writer)
        self.relays.add(relay)
        try:
            writer.write(_framed(HandedCall(_packed(tensors), dict(parameters))))
            await relay.run(reader)
        except (asyncio.IncompleteReadError, ConnectionError, msgspec.MsgspecError) as error:
            if not relay.has_left:
                raise EngineDead(f"the instance {name} was lost") from error
            responder.close()
        finally:
            self.relays.discard(relay)
            writer.transport.abort()  # nothing that was not sent is wanted any more

    def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._served[task] = writer
        task.add_done_callback(self._served.pop)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One call of another instance. Its end, or that of the connection, ends this."""
        responder = _SocketResponder(writer)
        try:
            call = await _read(reader)
            if isinstance(call, HandedCall):
                self._accept(_unpacked(call.tensors), call.parameters, responder)
                await reader.read()  # until the other side has got all, or its client has left
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            responder.has_left = True
            writer.close()

    def _path(self, name: str) -> Path:
        return self._directory / name


class Relay:
    """A call that was handed on."""

    def __init__(self, responder: Responder, writer: asyncio.StreamWriter) -> None:
        self.responder = responder
        self.has_left = False
        self._writer = writer

    async def run(self, reader: asyncio.StreamReader) -> None:
        """Until the last answer."""
        while True:
            answer = await _read(reader)
            if not isinstance(answer, HandedAnswer):
                raise EngineDead("an instance answered with something else")
            if answer.failure is not None:
                self.responder.fail(decode_failure(answer.failure))
            elif answer.is_last and not answer.tensors:
                self.responder.close()
            else:
                self.responder.send(_unpacked(answer.tensors), is_last=answer.is_last)
            if answer.is_last:
                return

    def leave(self) -> None:
        """The client has left; on the event loop."""
        self.has_left = True
        self._writer.transport.abort()


class _SocketResponder:
    """To another instance of the server. Sends on the event loop."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.has_left = False
        self._writer = writer

    def send(self, tensors: Tensors, *, is_last: bool) -> None:
        self._send(HandedAnswer(_packed(tensors), is_last))

    def fail(self, failure: Failure) -> None:
        self._send(HandedAnswer({}, True, encode_failure(failure)))

    def close(self) -> None:
        self._send(HandedAnswer({}, True))

    def is_cancelled(self) -> bool:
        return self.has_left

    def _send(self, answer: HandedAnswer) -> None:
        if not self._writer.is_closing():
            self._writer.write(_framed(answer))


def directory_of(server_pid: int) -> Path:
    """Of the sockets of all instances of a server; no other process, now or later, has the same one."""
    return Path(tempfile.gettempdir()) / f"{_prefix()}{server_pid}-{_started(server_pid)}"


def _prefix() -> str:
    return f"nsm-instances-{os.getuid()}-"


def _started(process_id: int) -> str:
    """When the process began, as the system counts. Raises OSError when it has ended."""
    return Path(f"/proc/{process_id}/stat").read_text().rpartition(") ")[2].split()[19]


def _remove_leftovers(parent: Path) -> None:
    """The directories of servers that were killed. One that another container shares has sockets that answer."""
    for path in parent.glob(f"{_prefix()}*"):
        process_id, _, started = path.name.removeprefix(_prefix()).partition("-")
        if not process_id.isdecimal():
            continue
        with contextlib.suppress(OSError):
            if _started(int(process_id)) == started:
                continue
        if not any(map(_answers, path.glob("*"))):
            shutil.rmtree(path, ignore_errors=True)


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client, contextlib.suppress(OSError):
        client.connect(str(path))
        return True
    return False


def _packed(tensors: Tensors) -> dict[str, PackedTensor]:
    return {
        name: PackedTensor("O", array.shape, array.reshape(-1)[0])
        if array.dtype.kind == "O"
        else PackedTensor(array.dtype.str, array.shape, array.tobytes())
        for name, array in tensors.items()
    }


def _unpacked(packed: Mapping[str, PackedTensor]) -> Tensors:
    return {
        name: np.array([tensor.raw], dtype=np.object_).reshape(tensor.shape)
        if tensor.dtype == "O"
        else np.frombuffer(tensor.raw, dtype=np.dtype(tensor.dtype)).reshape(tensor.shape)
        for name, tensor in packed.items()
    }


def _framed(message: HandedCall | HandedAnswer) -> bytes:
    raw = _encoder.encode(message)
    return len(raw).to_bytes(LENGTH_BYTES, "little") + raw


async def _read(reader: asyncio.StreamReader) -> HandedCall | HandedAnswer:
    return _decoder.decode(await reader.readexactly(int.from_bytes(await reader.readexactly(LENGTH_BYTES), "little")))
