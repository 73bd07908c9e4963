"""The model in an engine's process on this machine, which this process reaches over a Unix socket."""

from __future__ import annotations

import array
import asyncio
import contextlib
import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from nsm_core.engine.generation_handle import GenerationHandle
from nsm_core.engine.request import Event, Finished, GenerationRequest, NamedState, TokenEvent
from nsm_core.engine.request_check import RequestCheck
from nsm_core.engine.stream_pace import StreamPace
from nsm_core.engine.token_text import TokenText
from nsm_core.errors import ConfigError, EngineDead, InvalidRequest, NsmError, Overloaded
from nsm_core.grammars.grammar import Grammar
from nsm_core.inspection.report import LayerReport
from nsm_core.model_info import ModelInfo
from nsm_core.state.layout import StateLayout
from nsm_core.state.report import Detail, StateReport
from nsm_core.stats import EngineStats
from nsm_core.tokenizer import Tokenizer
from nsm_core.tokenizer_files import tokenizer_from_json
from nsm_core.wire import local as wire
from service.backends.process.engine_link import EngineLink

logger = logging.getLogger("nsm.engine")

HEARTBEAT_LIMIT_S = 5.0  # an engine that tells nothing for so long hangs
RETRY_MIN_S, RETRY_MAX_S = 0.1, 2.0  # between tries to reach an engine that was lost
STOP_S = 3.0  # for the last events of requests that are stopped
MoveOn = Callable[[GenerationHandle], bool]  # gives a request to another engine; False where none has room


@dataclasses.dataclass(frozen=True, slots=True)
class EngineIndex:
    """Of one engine among several: numbers of the states that they hold tell whose they are."""

    index: int = 0
    num_engines: int = 1

    def of_all(self, number: int) -> int:
        """A number of this engine, as the gateway has it."""
        return number * self.num_engines + self.index

    def of_engine(self, number: int) -> int:
        """The inverse of `of_all`."""
        return number // self.num_engines


class ProcessBackend:
    """An InferenceBackend. Needs neither torch nor the model's files.

    The socket outlives the engine: a new process on it is waited for, and until it answers requests are refused. Those
    that the old one had end with EngineDead. `reports_engine`: `stats` tells the engine's own numbers; of several
    gateways on one engine, whose metrics are summed up, one does. `index`: of the engine among several.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_interval_s: float = 0.0,
        reports_engine: bool = True,
        index: EngineIndex = EngineIndex(),  # frozen
    ) -> None:
        self._path, self.index = path, index
        self._reports_engine = reports_engine
        self._pace = StreamPace(max_interval_s)
        self._end: EngineDead | None = EngineDead("the backend was not started")
        self._hello: wire.Hello | None = None
        self._tokenizer: Tokenizer | None = None
        self._check: RequestCheck | None = None
        self._writer: asyncio.WriteTransport | None = None
        self._outbox: list[bytes] = []
        self._numbers = itertools.count()
        self._handles: dict[int, GenerationHandle] = {}
        self._num_sampled: dict[int, int] = {}  # by the number of the request
        self._move_on: dict[int, MoveOn] = {}
        self._by_id: dict[str, int] = {}
        self._questions: dict[int, asyncio.Future[wire.Answer]] = {}
        self._parts: dict[int, list[bytes]] = {}  # of answers to them whose end has not come
        self._status = EngineStats()
        self._heard_at = 0.0
        self._num_others = 0
        self._following: asyncio.Task[None] | None = None
        self._has_none = asyncio.Event()
        self._has_none.set()

    @property
    def model(self) -> ModelInfo:
        return self._known.model

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise EngineDead("the engine's process has not answered yet")
        return self._tokenizer

    @property
    def max_requests(self) -> int:
        return self._known.max_requests

    @property
    def load(self) -> int:
        """Requests of all gateways that the engine has, by what was heard last."""
        return len(self._handles) + self._num_others

    def has_request(self, request_id: str) -> bool:
        """Whether a request of that id runs."""
        return request_id in self._by_id

    async def start(self) -> None:
        link = await self._connect()
        self._end = None
        self._following = asyncio.create_task(self._follow(link))

    async def stop(self) -> None:
        self._end = self._end or EngineDead("the backend is stopping")
        for handle in list(self._handles.values()):
            handle.cancel()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._has_none.wait(), STOP_S)
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait((self._following,))
        for handle in list(self._handles.values()):  # the engine did not answer
            handle.fail(None)
        self._handles.clear()

    def require_room(self) -> None:
        if self._end is not None:
            raise EngineDead(str(self._end))
        if self._writer is None:
            raise EngineDead("the engine's process is starting again")
        if self._heartbeat_age_s() >= HEARTBEAT_LIMIT_S:
            raise EngineDead(f"the engine does not answer: no sign of life for {self._heartbeat_age_s():.0f} s")
        if self.load >= self.max_requests:
            raise Overloaded(f"the queue is full: the engine takes {self.max_requests} requests")

    def has_room(self) -> bool:
        """Whether `require_room` would not raise."""
        try:
            self.require_room()
        except (EngineDead, Overloaded):
            return False
        return True

    def submit(self, request: GenerationRequest, *, move_on: MoveOn | None = None) -> GenerationHandle:
        """`move_on`: called, instead of the request's end, where the engine turns out to be full."""
        if self.has_request(request.request_id):
            raise InvalidRequest(f"request id {request.request_id} is in use", param="request_id")
        self.require_room()
        if self._check is None:
            raise EngineDead("the backend was not started")
        self._check.check(request)
        text = TokenText(self.tokenizer, request) if request.has_free_text else None
        handle = GenerationHandle(request, self._cancel, self._pace, text)
        handle.start_timer(asyncio.get_running_loop())
        self._give(handle, move_on)
        return handle

    def take_over(self, handle: GenerationHandle, *, move_on: MoveOn | None = None) -> None:
        """A request that another engine refused, before its first event; there is room."""
        handle.move(self._cancel, self._pace)
        self._give(handle, move_on)

    def _give(self, handle: GenerationHandle, move_on: MoveOn | None) -> None:
        """The request goes to the engine."""
        request, number = handle.request, next(self._numbers)
        self._handles[number], self._by_id[request.request_id] = handle, number
        self._num_sampled[number] = len(request.sampled_ids)
        if move_on is not None:
            self._move_on[number] = move_on
        self._has_none.clear()
        self._send(wire.Submit(number, self._of_engine(request)))

    async def check_grammar(self, grammar: Grammar) -> None:
        await self._ask(wire.AskGrammar(next(self._numbers), grammar))

    async def inspect_state(
        self, state: bytes | None, *, detail: Detail = Detail.LAYER, layer: int | None = None
    ) -> StateReport:
        answer = await self._ask(wire.AskState(next(self._numbers), state, detail, layer))
        if answer.state is None:
            raise EngineDead("the engine's process answered without a report")
        return answer.state

    async def inspect_text(
        self, state: bytes | None, ids: Sequence[int], *, has_tokens: bool = False
    ) -> tuple[LayerReport, ...]:
        question = wire.AskText(next(self._numbers), state, tuple(ids), has_tokens)
        return (await self._ask(question)).layers

    @property
    def holds_states(self) -> bool:
        """Megabytes need not cross processes."""
        return True

    async def fetch_state(self, number: int) -> bytes | None:
        return (await self._ask(wire.FetchState(next(self._numbers), self.index.of_engine(number)))).raw

    async def find_state(self, name: str) -> NamedState | None:
        named = (await self._ask(wire.FindState(next(self._numbers), name))).named
        return None if named is None else NamedState(self.index.of_all(named.number), named.about)

    def name_state(self, name: str, number: int, about: bytes) -> None:
        self._send(wire.NameState(name, self.index.of_engine(number), about))

    def forget_state(self, name: str) -> None:
        self._send(wire.ForgetState(name))

    def drop_state(self, number: int) -> None:
        self._send(wire.DropState(self.index.of_engine(number)))

    def is_ready(self) -> bool:
        return self._end is None and self._writer is not None and self._heartbeat_age_s() < HEARTBEAT_LIMIT_S

    def stats(self) -> EngineStats:
        """The engine's numbers for all gateways; nothing but the heartbeat unless this gateway tells them."""
        stats = self._status if self._reports_engine else EngineStats()
        return dataclasses.replace(stats, heartbeat_age_s=self._heartbeat_age_s())

    @property
    def _known(self) -> wire.Hello:
        if self._hello is None:
            raise EngineDead("the engine's process has not answered yet")
        return self._hello

    def _heartbeat_age_s(self) -> float:
        return self._status.heartbeat_age_s + time.monotonic() - self._heard_at

    def _cancel(self, request_id: str) -> None:
        number = self._by_id.get(request_id)
        if number is not None:
            self._send(wire.Cancel(number))

    def _send(self, message: wire.ToEngine) -> None:
        """With all others of this turn of the event loop: each write wakes the engine's process."""
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(wire.encode(message))

    def _flush(self) -> None:
        messages, self._outbox = self._outbox, []
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(b"".join(messages))

    async def _ask(self, question: wire.Question) -> wire.Answer:
        """Raises what the engine raised, or EngineDead."""
        if self._writer is None:
            raise EngineDead("the engine's process is starting again")
        answered: asyncio.Future[wire.Answer] = asyncio.get_running_loop().create_future()
        self._questions[question.number] = answered
        try:
            self._send(question)
            answer = await answered
        finally:
            del self._questions[question.number]
            self._parts.pop(question.number, None)
        if answer.error is not None:
            raise answer.error
        return answer

    async def _connect(self) -> EngineLink:
        """Waits for the engine's first message. Raises ConfigError or OSError."""
        loop = asyncio.get_running_loop()
        transport, link = await loop.create_unix_connection(lambda: EngineLink(self._take), str(self._path))
        try:
            hello = await link.first
            if isinstance(hello, wire.CannotStart):
                raise ConfigError(hello.message)
            if not isinstance(hello, wire.Hello):
                raise ConfigError("the engine's process is of another version")
            if self._hello is not None and hello.model.fingerprint != self._hello.model.fingerprint:
                raise ConfigError("the engine's process came back with another model")
        except BaseException:
            transport.close()
            raise
        if self._hello is None:
            self._tokenizer = tokenizer_from_json(hello.tokenizer)
        self._hello, self._writer, self._heard_at = hello, transport, time.monotonic()
        self._check = RequestCheck(
            vocab_size=self.tokenizer.vocab_size,
            spec=StateLayout(hello.model.state_layout),
            fingerprint=hello.model.fingerprint,
        )
        return link

    async def _follow(self, link: EngineLink) -> None:
        """Until it is cancelled: this engine, and those that take its place."""
        try:
            while True:
                await link.lost.wait()
                self._lose()
                link = await self._reconnect()
        finally:
            if self._writer is not None:
                self._writer.close()

    async def _reconnect(self) -> EngineLink:
        retry_s = RETRY_MIN_S
        while True:
            try:
                link = await self._connect()
            except (OSError, NsmError) as error:
                logger.warning("the engine's process is not back: %s: %s", type(error).__name__, error)
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, RETRY_MAX_S)
            else:
                logger.info("the engine's process is back")
                return link

    def _lose(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer, self._num_others, self._status = None, 0, EngineStats()
        self._outbox.clear()  # what was submitted ends here
        logger.warning("the engine's process was lost, with %d requests of this gateway", len(self._handles))
        for number in list(self._handles):
            self._handles[number].fail(EngineDead("the engine's process ended"))
            self._forget(number)
        for answered in self._questions.values():
            if not answered.done():
                answered.set_exception(EngineDead("the engine's process ended"))

    def _take(self, message: wire.ToGateway) -> None:
        self._heard_at = time.monotonic()
        if isinstance(message, wire.Step):
            self._num_others = message.num_others
            self._deliver(message)
        elif isinstance(message, wire.Status):
            self._status, self._num_others = message.stats, message.num_others
        elif isinstance(message, wire.AnswerPart):
            if message.number in self._questions:  # else nobody waits for it any more
                self._parts.setdefault(message.number, []).append(message.raw)
        elif isinstance(message, wire.Answer):
            self._take_answer(message)

    def _take_answer(self, answer: wire.Answer) -> None:
        parts, answered = self._parts.pop(answer.number, None), self._questions.get(answer.number)
        if answered is not None and not answered.done():
            if parts is not None:
                answer.raw = b"".join((*parts, answer.raw or b""))
            answered.set_result(answer)

    def _deliver(self, step: wire.Step) -> None:
        others: tuple[tuple[int, Event], ...] = (*step.scored, *step.states, *step.tokens)
        for number, event in others:
            if isinstance(event, TokenEvent):
                self._num_sampled[number] = event.index
            self._handles[number].deliver(event)
        handles = self._handles
        for number, token_id in zip(array.array("I", step.numbers), array.array("I", step.ids), strict=True):
            handle = handles.get(number)
            if handle is not None:  # else its deadline has ended it, while the engine was in a step
                handle.deliver_id(token_id)
        numbers, ids = array.array("I", step.shown_numbers), array.array("I", step.shown_ids)
        for number, token_id, text in zip(numbers, ids, step.texts, strict=True):
            index = self._num_sampled[number] + 1
            self._num_sampled[number] = index
            self._handles[number].deliver(TokenEvent(index=index, token_id=token_id, text=text))
        for number, end in step.ends:
            self._end_request(number, self._of_all(end))
        self._pace.step_ended()

    def _end_request(self, number: int, end: Finished) -> None:
        """Its last event, unless the engine is full and another one takes it."""
        handle, move_on = self._handles[number], self._move_on.get(number)
        self._forget(number)
        if isinstance(end.error, Overloaded) and not handle.num_tokens:
            self._num_others = max(self._num_others, self.max_requests)  # others filled it: until it tells otherwise
            if move_on is not None and move_on(handle):
                return
        if end.error is not None and end.completion_tokens < handle.num_tokens:  # of one who did not see the tokens
            end = dataclasses.replace(end, completion_tokens=handle.num_tokens)
        handle.deliver(end)

    def _of_engine(self, request: GenerationRequest) -> GenerationRequest:
        """With the engine's own number of the held state that it starts from."""
        resume = request.resume
        if resume is None or resume.held is None:
            return request
        own = dataclasses.replace(resume, held=self.index.of_engine(resume.held))
        return dataclasses.replace(request, resume=own)

    def _of_all(self, end: Finished) -> Finished:
        """With the number that its held state has among those of all engines."""
        state = end.end_state
        if state is None or state.held is None:
            return end
        return dataclasses.replace(end, end_state=dataclasses.replace(state, held=self.index.of_all(state.held)))

    def _forget(self, number: int) -> None:
        handle = self._handles.pop(number)
        self._move_on.pop(number, None)
        del self._num_sampled[number], self._by_id[handle.request.request_id]
        if not self._handles:
            self._has_none.set()
