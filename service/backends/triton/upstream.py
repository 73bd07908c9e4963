"""One instance of a Triton server as a gateway sees it: its health, model and load."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator

from nsm_core.engine.stream_pace import StreamPace
from nsm_core.errors import ConfigError, EngineDead, NsmError
from nsm_core.stats import EngineStats
from nsm_core.wire.call_tensors import encode_call
from nsm_core.wire.calls import DescribeCall, GenerateCall, InspectCall, StatusCall
from nsm_core.wire.description import WorkerDescription, WorkerStatus, decode_description, decode_status
from nsm_core.wire.tensors import Tensors
from service.backends.triton.channel import CallFailed, ServerStopping, TritonChannel
from service.backends.triton.link import Receiver, TritonLink
from service.backends.triton.tls import TritonTls

logger = logging.getLogger("nsm.triton")

# A dead worker is noticed after at most both together, which leaves room in the 5 s that a readiness probe is promised.
HEARTBEAT_S = 1.0
ANSWER_S = 3.0
RETRY_MIN_S, RETRY_MAX_S = 0.25, 5.0  # between tries to reach a server that is down
_CHANGES = {
    True: (logging.INFO, "Triton server %s is ready"),
    False: (logging.WARNING, "Triton server %s takes no new work"),
}


class Upstream:
    """`watch` keeps it true. Belongs to one event loop.

    `number`: of the instance among those of its server. `pace`: of diverted tokens. `admit` gets the worker's
    description and raises ConfigError where it must not be used; `on_change` is called whenever the server comes, goes
    or is refused.
    """

    def __init__(
        self,
        url: str,
        *,
        number: int = 0,
        pace: StreamPace,
        tls: TritonTls | None = None,
        admit: Callable[[Upstream, WorkerDescription], None],
        on_change: Callable[[], None],
    ) -> None:
        self.url, self.number = url, number
        self._instance: str | None = None  # by its last description
        self.error: NsmError | None = None  # why it is not up, None while nobody knows
        self.counted = EngineStats()  # steps and joules seen of it; its own counters begin anew when it does
        self._admit = admit
        self._on_change = on_change
        self._description: WorkerDescription | None = None  # as it told last
        self._is_described = False  # since it was lost
        self._status: WorkerStatus | None = None
        self._is_suspect = False
        self._beat_at = time.monotonic()
        self._num_others = 0
        self._most_own = 0  # since the last heartbeat
        self._pace = pace
        self._link: TritonLink | None = None
        self._hurry = asyncio.Event()
        self._tls = tls
        self._channel = TritonChannel(url, tls=tls)
        # apart from the requests: a full connection must not look like a dead server
        self._control = TritonChannel(url, tls=tls)

    @property
    def is_up(self) -> bool:
        """Its last heartbeat was good and nothing broke since."""
        is_linked = self._link is not None and self._link.is_open
        return is_linked and self._status is not None and self._status.is_ready and not self._is_suspect

    @property
    def heartbeat_age_s(self) -> float:
        """Time since its last good heartbeat, or since this gateway began to ask."""
        return time.monotonic() - self._beat_at

    @property
    def max_slots(self) -> int:
        return self._description.max_slots if self._description is not None and self._is_described else 0

    @property
    def capacity(self) -> int:
        """Requests that it runs or queues, by its last description."""
        known = self._description
        return 0 if known is None else known.max_slots + known.queue_limit

    @property
    def max_prompt_tokens(self) -> int | None:
        """Of one call, by its last description; None before the first."""
        return None if self._description is None else self._description.max_prompt_tokens

    @property
    def num_own(self) -> int:
        """Requests of this gateway."""
        return 0 if self._link is None else self._link.num_requests

    @property
    def load(self) -> int:
        """Requests of this gateway, and those of others at the last heartbeat."""
        return self._num_others + self.num_own

    @property
    def state_pool_bytes(self) -> int:
        return 0 if self._status is None else self._status.engine.state_pool_bytes

    @contextlib.contextmanager
    def request(self, call: GenerateCall, receiver: Receiver) -> Iterator[None]:
        """A request, which the server is asked to cancel if it still runs when the block is left. Raises EngineDead."""
        link = self._link
        if link is None:
            raise EngineDead("the Triton server was lost")
        number = link.start(call, receiver)
        self._most_own = max(self._most_own, link.num_requests)
        try:
            yield
        finally:
            link.cancel(number)

    async def ask(self, call: DescribeCall | StatusCall | InspectCall, *, timeout_s: float) -> Tensors:
        """The one answer. Raises what `TritonStream.receive` raises."""
        return await self._control.ask(encode_call(call), timeout_s=timeout_s, instance=self._instance)

    def suspect(self) -> None:
        """A request was lost: no new request until the next good heartbeat, which is asked for now."""
        self._is_suspect = True
        self._is_described = False  # another may answer at this address
        self._hurry.set()

    async def watch(self) -> None:
        """Heartbeats, until it is cancelled."""
        retry_s = RETRY_MIN_S
        while True:
            self._hurry.clear()
            try:
                await self._beat()
            except (NsmError, CallFailed) as error:
                self._lose(error if isinstance(error, NsmError) else EngineDead(str(error)))
                pause_s, retry_s = retry_s, min(2 * retry_s, RETRY_MAX_S)
            else:
                pause_s, retry_s = HEARTBEAT_S, RETRY_MIN_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._hurry.wait()

    async def close(self) -> None:
        """Requests that still run are lost."""
        if self._link is not None:
            await self._link.leave(EngineDead("the backend is stopping"))
        await asyncio.gather(self._channel.close(), self._control.close())

    async def _beat(self) -> None:
        if not self._is_described:
            description = await self._describe()
            self._admit(self, description)
            self._instance = self._instance_of(description)
            self._description, self._is_described = description, True
        status = decode_status(await self.ask(StatusCall(), timeout_s=ANSWER_S))
        if self._link is None or not self._link.is_open:
            link = TritonLink(self._channel, self._instance, self._pace, self._note_loss)
            await link.open(timeout_s=ANSWER_S)
            self._link = link
        if not self._is_described:  # a request was lost meanwhile, after this was said: it is asked anew at once
            return
        if self._status is not None and status.engine.num_steps < self._status.engine.num_steps:
            self._is_described = False  # it began anew between two heartbeats
            raise EngineDead("it was started again")
        self._note(status)

    def _instance_of(self, description: WorkerDescription) -> str | None:
        """The name of this one; None if there is no other. Raises EngineDead if the server has fewer."""
        names = description.instances
        if self.number >= max(1, len(names)):
            raise EngineDead(f"the server has {len(names)} instances")
        return names[self.number] if len(names) > 1 else None

    async def _describe(self) -> WorkerDescription:
        """By any instance."""
        self._instance = None
        try:
            return decode_description(await self.ask(DescribeCall(), timeout_s=ANSWER_S))
        except CallFailed as error:  # of another contract, say
            raise ConfigError(f"Triton server {self.url} refused to describe itself: {error}") from error

    def _note(self, status: WorkerStatus) -> None:
        was_up, engine, before = self.is_up, status.engine, self._status
        base = engine if before is None else before.engine
        self.counted = self.counted.with_steps(engine, since=base)
        # requests that were ours a moment ago may still be counted there
        self._num_others = max(0, engine.num_running + engine.num_waiting - self._most_own)
        self._most_own = self.num_own
        self._status, self._is_suspect = status, False
        if status.is_ready:
            self._beat_at = time.monotonic()
        self.error = None if status.is_ready else EngineDead("its engine makes no steps")
        if self.is_up != was_up:
            logger.log(*_CHANGES[self.is_up], self.url)
            self._on_change()

    def _note_loss(self, link: TritonLink) -> None:
        """A link broke by itself."""
        if link is self._link:
            self.suspect()

    def _lose(self, error: NsmError) -> None:
        is_news = self.error is None or str(error) != str(self.error)
        self.error, self._status, self._is_described = error, None, False
        if self._link is not None and isinstance(error, ServerStopping):
            self._link.close_when_idle()
        elif self._link is not None:
            self._link.cut(EngineDead("the Triton server does not answer any more"))
        if is_news:
            logger.warning("Triton server %s is not used: %s", self.url, error)
            self._on_change()
