"""The gateway's side of a link: one long call to a Triton server, which carries the events of all requests on it."""

from __future__ import annotations

import array
import asyncio
import itertools
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

from nsm_core.engine.request import Event
from nsm_core.engine.stream_pace import StreamPace
from nsm_core.errors import EngineDead, NsmError
from nsm_core.wire.call_tensors import encode_call
from nsm_core.wire.calls import GenerateCall, LinkCall, PostCall
from nsm_core.wire.link import (
    TAKEN_EVERY,
    Cancel,
    LinkStep,
    Opened,
    Start,
    Taken,
    ToGateway,
    ToWorker,
    decode_to_gateway,
    encode_to_worker,
)
from nsm_core.wire.tensors import MESSAGES, read_bytes
from service.backends.triton.channel import CallFailed, ServerStopping, TritonChannel, TritonStream

LEAVE_S = 3.0  # for the server to end the calls of a gateway that leaves
Received = TypeVar("Received")


class Receiver(Protocol):
    """One request, on the event loop. Its last call is `take` with a Finished, `lack_state` or `lose`."""

    def take(self, event: Event) -> None: ...

    def take_id(self, token_id: int) -> None:
        """A token whose text the gateway makes."""
        ...

    def take_shown(self, token_id: int, text: str) -> None:
        """A token whose text the worker has made."""
        ...

    def note_retained(self, state_id: str) -> None:
        """The worker has kept the end state; before `take` of the end."""
        ...

    def lack_state(self) -> None:
        """The worker lacks the state that the call names: see StateMissing."""
        ...

    def lose(self, error: EngineDead) -> None:
        """The link broke."""
        ...


class TritonLink:
    """`open` once, then `cut` or `leave`. `instance`: of the server, None for any. `pace`: of diverted tokens;
    `on_loss`: called when the link breaks by itself.
    """

    def __init__(
        self,
        channel: TritonChannel,
        instance: str | None,
        pace: StreamPace,
        on_loss: Callable[[TritonLink], None],
    ) -> None:
        self._channel, self._instance, self._pace, self._on_loss = channel, instance, pace, on_loss
        self._name = uuid.uuid4().hex
        self._streams: list[TritonStream] = []
        self._receivers: dict[int, Receiver] = {}
        self._numbers = itertools.count()
        self._num_posts = itertools.count()
        self._posted: dict[int, list[int]] = {}  # the requests that were started by a call, while they run
        self._outbox: list[ToWorker] = []
        self._has_words = asyncio.Event()
        self._num_answers = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._leaving: asyncio.Task[None] | None = None
        self._end: EngineDead | None = EngineDead("the link is not open")
        self._is_closing = False

    @property
    def is_open(self) -> bool:
        """Whether requests may be started."""
        return self._end is None and not self._is_closing

    @property
    def num_requests(self) -> int:
        return len(self._receivers)

    async def open(self, *, timeout_s: float) -> None:
        """Raises EngineDead or CallFailed, and then it is to be thrown away."""
        stream = self._channel.open(timeout_s=None, instance=self._instance)
        try:
            async with asyncio.timeout(timeout_s):
                await stream.send(encode_call(LinkCall(self._name)))
                opened = await self._receive(stream)
        except TimeoutError:
            stream.cancel()
            raise EngineDead("the Triton server opens no link") from None
        except BaseException:
            stream.cancel()
            raise
        if not isinstance(opened, Opened):
            stream.cancel()
            raise EngineDead("the Triton server opened a link with something else")
        # Apart from the link: Triton may abort when it refuses a call on the stream of one that runs
        posts = self._channel.open(timeout_s=None, instance=self._instance)
        self._streams, self._end = [stream, posts], None
        loops = self._read_on(stream), self._write_on(posts), self._read_refusals(posts)
        self._tasks = [asyncio.create_task(loop) for loop in loops]

    def start(self, call: GenerateCall, receiver: Receiver) -> int:
        """The number of the request. Raises EngineDead."""
        if self._end is not None:
            raise EngineDead(str(self._end))
        number = next(self._numbers)
        self._receivers[number] = receiver
        self._queue(Start(number, call))
        return number

    def cancel(self, number: int) -> None:
        """Nothing is received any more. After the end of the request without effect."""
        if self._receivers.pop(number, None) is not None:
            self._queue(Cancel(number))
            self._close_if_idle()

    def close_when_idle(self) -> None:
        """Requests that run may end; no other is to be started."""
        self._is_closing = True
        self._close_if_idle()

    def cut(self, error: EngineDead) -> None:
        """Ends it at once, with its requests. Idempotent."""
        if self._end is not None:
            return
        self._end = error
        self._cancel()
        self._lose_all(error)

    def _lose_all(self, error: EngineDead) -> None:
        receivers, self._receivers = list(self._receivers.values()), {}
        for receiver in receivers:
            receiver.lose(error)

    def _close_if_idle(self) -> None:
        if self._is_closing and not self._receivers and self._end is None:
            self._end = EngineDead("the Triton server is stopping")
            self._leaving = asyncio.create_task(self._leave())

    async def leave(self, error: EngineDead) -> None:
        """`cut` in good order: returns when the server has ended the calls, or a few seconds later."""
        if self._end is None:
            self._end = error
            self._leaving = asyncio.create_task(self._leave())
            self._lose_all(error)
        if self._leaving is not None:
            await asyncio.wait((self._leaving,))

    async def _leave(self) -> None:
        """Lets calls end that are about to, see `TritonStream.finish`. So is the link where the server stops."""
        link, posts = self._streams
        ending, tasks = ([posts], self._tasks[1:]) if not self._is_closing else (self._streams, self._tasks)
        self._has_words.set()  # for the last call
        await link.end_calls()
        _, late = await asyncio.wait(tasks, timeout=LEAVE_S)
        if not late:
            await asyncio.gather(*(stream.finish() for stream in ending))
        self._cancel()

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        for stream in self._streams:
            stream.cancel()

    def _queue(self, message: ToWorker) -> None:
        """With all others until the loop comes to it: each call costs the server as much as an answer."""
        self._outbox.append(message)
        self._has_words.set()

    async def _write_on(self, stream: TritonStream) -> None:
        while True:
            await self._has_words.wait()
            self._has_words.clear()
            if self._end is not None:
                await stream.end_calls()
                return
            messages, self._outbox = self._outbox, []
            number = next(self._num_posts)
            self._note_posted(number, messages)
            call = PostCall(self._name, number, encode_to_worker(messages))
            try:
                await stream.send(encode_call(call), call_id=str(number))
            except NsmError as error:
                self._break(error)
                return

    def _note_posted(self, number: int, messages: list[ToWorker]) -> None:
        self._posted = {
            call: numbers for call, numbers in self._posted.items() if not self._receivers.keys().isdisjoint(numbers)
        }
        if started := [message.number for message in messages if isinstance(message, Start)]:
            self._posted[number] = started

    async def _read_on(self, stream: TritonStream) -> None:
        try:
            while True:
                self._take(await self._receive(stream))
        except (NsmError, CallFailed) as error:
            self._break(error)

    async def _read_refusals(self, posts: TritonStream) -> None:
        """Calls that are taken have no answer."""
        while True:
            try:
                await posts.receive()
            except ServerStopping as error:  # it refuses every call that is made now, and those that run go on
                self._lose_posted(posts.refused_id, error)
                self.close_when_idle()
            except (NsmError, CallFailed) as error:
                self._break(error)
                return

    def _lose_posted(self, call_id: str, error: EngineDead) -> None:
        """The requests of a call that the server has refused."""
        for number in self._posted.pop(int(call_id), ()) if call_id else ():
            receiver = self._receivers.pop(number, None)
            if receiver is not None:
                receiver.lose(error)

    async def _receive(self, stream: TritonStream) -> ToGateway:
        return decode_to_gateway(read_bytes(await stream.receive(), MESSAGES))

    def _break(self, error: NsmError | CallFailed) -> None:
        if self._end is None:
            self.cut(error if isinstance(error, EngineDead) else EngineDead(str(error)))
            self._on_loss(self)

    def _take(self, message: ToGateway) -> None:
        self._num_answers += 1
        if self._num_answers % TAKEN_EVERY == 0:
            self._queue(Taken(self._num_answers))
        if isinstance(message, LinkStep):
            self._deliver(message)
            self._pace.step_ended()
            self._close_if_idle()

    def _deliver(self, message: LinkStep) -> None:
        step = message.step
        others: tuple[tuple[int, Event], ...] = (*step.scored, *step.states, *step.tokens)
        for receiver, event in self._wanted(others):
            receiver.take(event)
        plain = zip(array.array("I", step.numbers), array.array("I", step.ids), strict=True)
        for receiver, token_id in self._wanted(plain):
            receiver.take_id(token_id)
        numbers, ids = array.array("I", step.shown_numbers), array.array("I", step.shown_ids)
        shown = zip(numbers, zip(ids, step.texts, strict=True), strict=True)
        for receiver, (token_id, text) in self._wanted(shown):
            receiver.take_shown(token_id, text)
        for receiver, state_id in self._wanted(message.retained):
            receiver.note_retained(state_id)
        for receiver, end in self._wanted(step.ends):
            receiver.take(end)
        for receiver, _ in self._wanted((number, None) for number in message.missing):
            receiver.lack_state()
        for number in (*(number for number, _ in step.ends), *message.missing):
            self._receivers.pop(number, None)

    def _wanted(self, received: Iterable[tuple[int, Received]]) -> Iterator[tuple[Receiver, Received]]:
        """Without those of requests that were cancelled meanwhile."""
        for number, value in received:
            receiver = self._receivers.get(number)
            if receiver is not None:
                yield receiver, value
