"""The engine's side: gives the backend of this process to the gateways that connect to a Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import socket
from typing import Protocol

from nsm_core.engine.async_engine import TakeTokens, TakeTokensNow
from nsm_core.engine.generation_handle import GenerationHandle
from nsm_core.engine.request import Event, Finished, FinishReason, GenerationRequest
from nsm_core.engine.token_rows import NUMBER_BITS, Ints
from nsm_core.errors import EngineDead, NsmError
from nsm_core.wire import local as wire
from nsm_core.wire.step_collector import StepCollector, step_of_tokens
from service.backends.base import HoldsStates, InferenceBackend
from service.backends.process.socket_writer import SocketWriter

logger = logging.getLogger("nsm.engine")

STATUS_S = 0.5  # between two accounts of the engine


class HandleBackend(InferenceBackend, HoldsStates, Protocol):
    """A backend whose generations can be listened to, and whose engine holds states."""

    def submit(self, request: GenerationRequest, *, tag: int | None = None) -> GenerationHandle: ...

    def listen_tokens(self, listener: TakeTokens, *, now: TakeTokensNow | None = None) -> None: ...


class EngineServer:
    """`serve` once. A gateway that leaves takes its requests with it; the others do not notice."""

    def __init__(self, backend: HandleBackend) -> None:
        self.backend = backend
        self.num_requests = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._indices = itertools.count(1)  # of listeners
        self._connections: dict[int, _Connection] = {}

    async def serve(self, sock: socket.socket) -> None:
        """Takes connections from now on. The backend has been started."""
        self.backend.listen_tokens(self._take_tokens, now=self._send_tokens)
        self._server = await asyncio.start_unix_server(self._connected, sock=sock)

    async def wait_until_left(self, *, within_s: float) -> None:
        """Until no gateway is connected any more, but no longer than `within_s`."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=within_s)

    async def stop(self) -> None:
        """Ends the connections; requests were ended by the backend's own stop."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a connection is served by a task")
        self._tasks.add(task)
        index = next(self._indices)
        connection = self._connections[index] = _Connection(self, writer, index)
        try:
            await connection.run(reader)
        except (asyncio.IncompleteReadError, ConnectionError):
            logger.info("a gateway has left the engine")
        except asyncio.CancelledError:
            pass  # the engine stops
        finally:
            del self._connections[index]
            connection.close()
            self._tasks.discard(task)

    def _send_tokens(self, index: int, numbers: Ints, ids: Ints) -> bool:
        """On the engine's thread; False: not now."""
        connection = self._connections.get(index)
        return connection is None or connection.send_tokens(numbers, ids)

    def _take_tokens(self, index: int, numbers: Ints, ids: Ints) -> None:
        connection = self._connections.get(index)
        if connection is not None:
            connection.add_tokens(numbers, ids)


class _Connection:
    """One gateway."""

    def __init__(self, server: EngineServer, writer: asyncio.StreamWriter, index: int) -> None:
        """`index`: no other connection has it, now or later."""
        self._tag = index << NUMBER_BITS
        self._server, self._backend, self._transport = server, server.backend, writer.transport
        self._handles: dict[int, GenerationHandle] = {}
        self._questions: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._writer = SocketWriter(writer.get_extra_info("socket").fileno(), self._loop)
        self._status_task = asyncio.create_task(self._report_status())
        self._is_due = False  # a step will be sent
        self._collector = StepCollector()

    async def run(self, reader: asyncio.StreamReader) -> None:
        """Until the gateway leaves."""
        backend = self._backend
        tokenizer = backend.tokenizer.to_json()
        self._send(wire.Hello(model=backend.model, tokenizer=tokenizer, max_requests=backend.max_requests))
        while True:
            message = await wire.read_to_engine(reader)
            if isinstance(message, wire.Submit):
                self._submit(message.number, message.request)
            elif isinstance(message, wire.NameState):
                backend.name_state(message.name, message.held, message.about)
            elif isinstance(message, wire.ForgetState):
                backend.forget_state(message.name)
            elif isinstance(message, wire.DropState):
                backend.drop_state(message.held)
            elif isinstance(message, wire.Cancel):
                handle = self._handles.get(message.number)
                if handle is not None:
                    handle.cancel()
            else:
                task = asyncio.create_task(self._answer(message))
                self._questions.add(task)
                task.add_done_callback(self._questions.discard)

    def close(self) -> None:
        """The gateway's requests end."""
        self._status_task.cancel()
        for handle in self._handles.values():
            handle.cancel()
        for task in self._questions:
            task.cancel()
        self._writer.close()
        self._transport.close()

    def _submit(self, number: int, request: GenerationRequest) -> None:
        try:
            handle = self._backend.submit(request, tag=self._tag | number)
        except NsmError as error:
            self._collector.add(number, Finished(reason=FinishReason.ERROR, error=error), has_free_text=True)
            self._make_due()
            return
        self._handles[number] = handle
        self._server.num_requests += 1
        handle.listen(functools.partial(self._take, number, request.has_free_text))

    def _take(self, number: int, has_free_text: bool, event: Event) -> None:
        if isinstance(event, Finished):
            del self._handles[number]
            self._server.num_requests -= 1
        self._collector.add(number, event, has_free_text=has_free_text)
        self._make_due()

    def add_tokens(self, numbers: Ints, ids: Ints) -> None:
        """Plain tokens of a step, to its message."""
        self._collector.add_tokens(numbers, ids)
        self._make_due()

    def send_tokens(self, numbers: Ints, ids: Ints) -> bool:
        """The same as a message of its own, on the engine's thread; False: what came before has not been written."""
        if self._is_due:
            return False
        return self._writer.write_now(wire.encode(step_of_tokens(numbers, ids, self._num_others)))

    def _make_due(self) -> None:
        """The message is sent when the loop has delivered all of the step."""
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._send_step)

    def _send_step(self) -> None:
        try:
            self._send(self._collector.take(self._num_others))
        finally:
            self._is_due = False  # now the engine's thread may write

    @property
    def _num_others(self) -> int:
        return self._server.num_requests - len(self._handles)

    async def _report_status(self) -> None:
        while True:
            self._send(wire.Status(self._backend.stats(), self._num_others))
            await asyncio.sleep(STATUS_S)

    async def _answer(self, question: wire.Question) -> None:
        answer, backend = wire.Answer(question.number), self._backend
        try:
            if isinstance(question, wire.AskState):
                answer.state = await backend.inspect_state(question.state, detail=question.detail, layer=question.layer)
            elif isinstance(question, wire.AskText):
                has_tokens = question.has_tokens
                answer.layers = await backend.inspect_text(question.state, question.ids, has_tokens=has_tokens)
            elif isinstance(question, wire.FetchState):
                answer.raw = await backend.fetch_state(question.held)
            elif isinstance(question, wire.FindState):
                answer.named = await backend.find_state(question.name)
            else:
                await backend.check_grammar(question.grammar)
        except NsmError as error:
            answer.error = error
        except Exception as error:
            logger.exception("a question of a gateway failed")
            answer.error = EngineDead(f"the engine's process failed: {type(error).__name__}")
        self._writer.write_later(wire.encode_in_parts(answer))

    def _send(self, message: wire.ToGateway) -> None:
        self._writer.write(wire.encode(message))


def refuse(sock: socket.socket, message: str) -> None:
    """Tells the first gateway that connects why there is no engine."""
    with contextlib.suppress(OSError):
        connection, _ = sock.accept()
        with connection:
            connection.sendall(wire.encode(wire.CannotStart(message)))
