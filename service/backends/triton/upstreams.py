"""All Triton servers of a gateway: which of them gets a request, and whether they serve one and the same model."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence

from nsm_core.engine.stream_pace import StreamPace
from nsm_core.errors import ConfigError, EngineDead
from nsm_core.state.report import StateReport
from nsm_core.tokenizer import Tokenizer
from nsm_core.tokenizer_files import tokenizer_from_json
from nsm_core.wire.calls import InspectCall
from nsm_core.wire.description import WorkerDescription, decode_report
from service.backends.triton.channel import CallFailed
from service.backends.triton.tls import TritonTls
from service.backends.triton.upstream import Upstream

INSPECT_S = 30.0
MAX_LOCATIONS = 16_384  # states whose servers are known


class Upstreams:
    """`start` and `stop` once each, on one event loop."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        wait_s: float,
        fingerprint: str | None = None,
        tls: TritonTls | None = None,
        max_interval_s: float = 0.0,
    ) -> None:
        """`wait_s`: how long `start` waits for a first server. `fingerprint`: of the one model to be used, if known.
        `tls`: with all of them; None for connections in the clear. `max_interval_s`: see StreamPace.
        """
        self.pace = StreamPace(max_interval_s)
        self._urls = tuple(urls)
        self.num_state_hits = 0  # turns whose state was where they went
        self.num_state_misses = 0  # turns whose state had to be sent
        self._wait_s = wait_s
        self._fingerprint = fingerprint
        self._tls = tls
        self._served: tuple[WorkerDescription, Tokenizer] | None = None
        self._all: tuple[Upstream, ...] = ()
        self._watches: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._locations: OrderedDict[str, Upstream] = OrderedDict()  # by state or prompt, the least recently used first
        self._num_picks = 0
        self._picked_at: dict[Upstream, int] = {}

    def __iter__(self) -> Iterator[Upstream]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    @property
    def served(self) -> tuple[WorkerDescription, Tokenizer]:
        """What all of them serve. Raises EngineDead before `start`."""
        if self._served is None:
            raise EngineDead("no Triton server has described its model yet")
        return self._served

    @property
    def is_any_up(self) -> bool:
        return any(upstream.is_up for upstream in self._all)

    @property
    def room(self) -> int:
        """Requests that may still come; below 0 where others brought too many."""
        return sum(upstream.capacity - upstream.load for upstream in self._all if upstream.is_up)

    @property
    def max_prompt_tokens(self) -> int:
        """Of one call, whichever of them gets it."""
        limits = [upstream.max_prompt_tokens for upstream in self._all]
        return min((limit for limit in limits if limit is not None), default=self.served[0].max_prompt_tokens)

    async def start(self) -> None:
        """Returns when one server is ready and no other is unfit. Raises ConfigError, and then nothing is left open."""
        for url in self._urls:
            self._add(url, 0)
        try:
            async with asyncio.timeout(self._wait_s):
                while not self._is_complete():
                    await self.change()
        except TimeoutError:
            if not self.is_any_up:
                reasons = "; ".join(f"{upstream.url}: {upstream.error or 'no answer'}" for upstream in self._all)
                await self.stop()
                raise ConfigError(f"no Triton server of NSM_TRITON_URL is ready: {reasons}") from None
        except BaseException:
            await self.stop()
            raise

    def _add(self, url: str, number: int) -> None:
        """An instance of a server, which is watched from now on."""
        made = Upstream(url, number=number, pace=self.pace, tls=self._tls, admit=self._admit, on_change=self._notify)
        self._all = (*self._all, made)
        self._watches.append(asyncio.create_task(made.watch()))

    async def stop(self) -> None:
        """Streams that are still open break. Idempotent."""
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        await asyncio.gather(*(upstream.close() for upstream in self._all))
        self._all, self._watches = (), []

    async def change(self) -> None:
        """Until a server comes, goes or is refused."""
        await self._changed.wait()

    def pick(
        self, state_id: str | None, *, prompt: str | None = None, avoid: Collection[Upstream] = ()
    ) -> Upstream | None:
        """The server for a request that resumes a state: the one that had it last unless it is full and another is not,
        else the one with the least to do. None where no server is up.

        `prompt`: the name of a prompt that several requests share; they go to one server, if it has room.
        """
        choice = [upstream for upstream in self._all if upstream.is_up and upstream not in avoid]
        if not choice:
            return None
        best = min(choice, key=lambda upstream: (upstream.load / upstream.max_slots, self._picked_at.get(upstream, 0)))
        homes = [self._locations.get(name) for name in (prompt, state_id) if name is not None]
        home = next((known for known in homes if known is not None), None)
        if home in choice and (home.load < home.max_slots or best.load >= best.max_slots):
            best = home
        self._num_picks += 1
        self._picked_at[best] = self._num_picks
        if prompt is not None:
            self.remember(prompt, best)
        return best

    def has_state(self, upstream: Upstream, state_id: str | None) -> bool:
        """Whether a server is thought to have kept a state."""
        return state_id is not None and self._locations.get(state_id) is upstream

    def remember(self, state_id: str, upstream: Upstream) -> None:
        """A server has kept a state, or reads a prompt."""
        self._locations[state_id] = upstream
        self._locations.move_to_end(state_id)
        if len(self._locations) > MAX_LOCATIONS:
            self._locations.popitem(last=False)

    def count_state(self, *, is_hit: bool) -> None:
        """A turn resumed a state on a server: without its bytes, or with them."""
        self.num_state_hits += is_hit
        self.num_state_misses += not is_hit

    async def inspect(self, call: InspectCall) -> StateReport:
        """By any server. Raises EngineDead, or what the worker refuses it with."""
        avoid: list[Upstream] = []
        while (upstream := self.pick(None, avoid=avoid)) is not None:
            try:
                return decode_report(await upstream.ask(call, timeout_s=INSPECT_S))
            except EngineDead:
                upstream.suspect()
                avoid.append(upstream)
            except CallFailed as error:
                raise error.failure.error from None
        raise EngineDead("no Triton server is ready")

    def _admit(self, upstream: Upstream, description: WorkerDescription) -> None:
        """The first server says what this gateway serves; its life long no other model will do.

        Further instances of a server are added when it is first seen to have them.
        """
        url = upstream.url
        self._check(url, description)
        num_known = sum(known.url == url for known in self._all)
        for number in range(num_known, len(description.instances)):
            self._add(url, number)

    def _check(self, url: str, description: WorkerDescription) -> None:
        if self._served is None:
            if self._fingerprint not in (None, description.model.fingerprint):
                raise _unfit(url, "fingerprint", description.model.fingerprint, f"NSM_MODEL has {self._fingerprint}")
            self._served = description, tokenizer_from_json(description.tokenizer)
            return
        served, model = self._served[0], description.model
        for name in ("fingerprint", "numerics", "chat_template", "state_bytes"):
            given, wanted = getattr(model, name), getattr(served.model, name)
            if given != wanted:
                raise _unfit(url, name, given, f"this gateway serves {wanted}")
        if description.tokenizer != served.tokenizer:
            raise ConfigError(f"Triton server {url} has another tokenizer than this gateway")

    def _is_complete(self) -> bool:
        """Whether nothing more is to be learned by waiting. Raises ConfigError for a server that must not be used."""
        for upstream in self._all:
            if isinstance(upstream.error, ConfigError):
                raise upstream.error
        return self.is_any_up and all(upstream.is_up or upstream.error is not None for upstream in self._all)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _unfit(url: str, name: str, given: object, wanted: str) -> ConfigError:
    return ConfigError(f"Triton server {url} serves a model with {name} {given}; {wanted}")
