"""Stateless requests that begin like earlier ones resume from a stored state and read only the rest.

Up to three states of a request are stored:

- where its prompt parts from others that this process has seen (a system prompt, examples): see `sightings`;
- at the end of its prompt: the next message of the same chat continues there. Where a prompt ends with the beginning
  of a thought, which later prompts do not have, before that;
- at the end of its answer, if the answer's text, encoded again behind the prompt, gives the ids that were sampled.
  Otherwise no later prompt would have them, and the next one resumes from the end of this prompt.

A state is stored only if a minimum gap separates it from the one before. The gap is MIN_TOKENS where beginnings are
known to come back: two prompts parted here, or this one resumed from a stored state. Elsewhere it is `min_tokens`,
because the end of an ordinary prompt may never be used again. On a GPU both are GPU_MIN_TOKENS at least.

The cache never fails a request and never delays one: a store that does not answer is a miss, and writes run apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Callable

from nsm_core.engine.request import EndState, GenerationRequest, PromptState, Resume
from nsm_core.errors import NsmError, SnapshotCorrupt
from nsm_core.state.quantize import StateFormat, rounded_state
from service.backends.base import InferenceBackend, holder_of
from service.stores.prefixes.base import PrefixStore
from service.stores.prefixes.entry import decode_entry
from service.stores.prefixes.keys import ID_BYTES, MIN_TOKENS, PromptDigests
from service.stores.prefixes.sightings import PrefixSightings
from service.stores.prefixes.writer import Breaker, PrefixWriter
from service.telemetry.metrics.metrics import Metrics
from service.telemetry.metrics.prefixes import PrefixOutcome

logger = logging.getLogger("nsm.prefixes")

LOOKUP_S = 0.5  # a store that takes longer is a miss
SWEEP_S = 60.0
# A GPU reads so many tokens while one state is copied to the host (`python -m benchmarks.gpu_ahead`, `gpu_decode`)
GPU_MIN_TOKENS = 1024

NextText = Callable[[str], str]
SaveState = Callable[[PromptState | EndState], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where one prompt starts and which of its states are stored. All choices share it; only the first stores states.

    `positions`: in tokens of the prompt. `save`: called with each state. `num_before`: tokens that the resumed state
    had read before the prompt. `is_held`: the state at the end stays with the engine, until there is time for it.
    """

    ids: tuple[int, ...]
    resume: Resume | None = None
    positions: tuple[int, ...] = ()
    has_end: bool = False
    save: SaveState | None = None
    num_before: int = 0
    is_held: bool = False

    @property
    def position(self) -> int:
        """Tokens of the prompt that need not be read."""
        return 0 if self.resume is None else self.resume.position - self.num_before

    def apply(self, request: GenerationRequest) -> GenerationRequest:
        """`request`, which reads the whole prompt, as one that starts here."""
        is_first = request.sampling.choice_index == 0
        if self.resume is None and not (is_first and (self.positions or self.has_end)):
            return request  # as nearly all, which read all of a short prompt
        return dataclasses.replace(
            request,
            prompt_ids=self.ids[self.position :],
            resume=self.resume,
            keep_states_at=tuple(position - self.position for position in self.positions) if is_first else (),
            keep_state=request.keep_state or (self.has_end and is_first),
            hold_state=self.is_held and self.has_end and is_first and not request.keep_state,
        )


class PrefixResume:
    """The use case. `store`: None when it is off for everybody. `state_format`: how states are stored.

    `min_tokens`: the minimum gap, in tokens, before a state at the end of an ordinary prompt or answer.
    """

    def __init__(
        self,
        backend: InferenceBackend,
        store: PrefixStore | None,
        metrics: Metrics,
        *,
        state_format: StateFormat = StateFormat.FP32,
        min_tokens: int = MIN_TOKENS,
    ) -> None:
        self._backend = backend
        self._min_tokens = min_tokens
        self._state_format = state_format
        self._store = store
        self._metrics = metrics
        self._sightings = PrefixSightings()
        self._breaker = Breaker()
        self._fetching = asyncio.Lock()
        self._writer = (
            None if store is None else PrefixWriter(backend, store, metrics, self._breaker, state_format=state_format)
        )

    @property
    def is_on(self) -> bool:
        return self._store is not None

    @contextlib.asynccontextmanager
    async def running(self, *, sweep_s: float = SWEEP_S) -> AsyncIterator[None]:
        """While inside, the store is open, and what expired is deleted. A store that is down is no reason to stop."""
        if self._store is None:
            yield
            return
        try:
            await self._store.open()
        except NsmError as error:
            self._breaker.failed(error)
        sweep = asyncio.create_task(self._sweep(self._store, sweep_s))
        try:
            yield
        finally:
            sweep.cancel()
            await self.drain()
            await self._store.close()

    async def drain(self) -> None:
        """Waits, for a short time, until all states saved so far are stored."""
        if self._writer is not None:
            await self._writer.drain()

    async def start(
        self,
        tenant: str,
        ids: tuple[int, ...],
        *,
        max_tokens: int,
        next_text: NextText | None,
        is_wanted: bool,
        num_opening: int = 0,
    ) -> Start:
        """For a prompt that may get `max_tokens` more. Never raises, and never takes much longer than LOOKUP_S.

        `next_text`: from the answer's text to the text that the next prompt will begin with; None when clients send
        ids. `is_wanted`: False when the tenant or the request opted out. `num_opening`: ids at the end that no later
        prompt has there, so that none has those of the answer behind them either.
        """
        writer = self._writer
        if writer is None or not is_wanted:
            self._metrics.prefixes.resumed("off")
            return Start(ids=ids)
        resume, positions = None, []
        min_gap, min_known_gap = self._min_gaps()
        if len(ids) > MIN_TOKENS:
            digests = PromptDigests(tenant=tenant, model=self._backend.model, ids=ids)
            resume = await self._find(tenant, digests)
            min_gap = min_known_gap if resume else min_gap
            shared = self._sightings.record(tenant, digests)
            positions = _positions_to_store(
                resumed=resume.position if resume else 0,
                shared=shared,
                end=len(ids) - num_opening,
                min_gap=min_gap,
                min_known_gap=min_known_gap,
            )
        else:
            self._metrics.prefixes.resumed("short")
        last = positions[-1] if positions else resume.position if resume else 0

        def save(state: PromptState | EndState) -> None:
            if isinstance(state, PromptState):
                writer.add(tenant, ids[: state.position], state.state)
            elif state.position - last >= min_gap:
                writer.spawn(self._save_end(writer, tenant, ids, state, next_text))
            else:
                self._drop(state)

        has_end = num_opening == 0 and len(ids) + max_tokens - last >= min_gap
        holder = holder_of(self._backend)
        is_held = holder is not None and holder.holds_states
        return Start(ids=ids, resume=resume, positions=tuple(positions), has_end=has_end, save=save, is_held=is_held)

    def _min_gaps(self) -> tuple[int, int]:
        """In tokens, before a state that may never be used, and before one where beginnings are known to come back."""
        if self._backend.model.numerics.startswith("cuda"):
            return max(self._min_tokens, GPU_MIN_TOKENS), GPU_MIN_TOKENS
        return self._min_tokens, MIN_TOKENS

    async def _find(self, tenant: str, digests: PromptDigests) -> Resume | None:
        """The longest stored beginning that leaves something to read; None for whatever reason there is none."""
        outcome: PrefixOutcome = "unavailable"
        resume, started = None, time.monotonic()
        if not self._breaker.is_open:
            try:
                async with asyncio.timeout(LOOKUP_S):
                    resume, outcome = await self._fetch(tenant, digests)
            except (NsmError, TimeoutError) as error:
                self._breaker.failed(error)
        seconds, num_resumed = time.monotonic() - started, resume.position if resume else 0
        self._metrics.prefixes.resumed(outcome)
        self._metrics.prefixes.looked_up(seconds, num_tokens=digests.num_ids, num_resumed=num_resumed)
        return resume

    async def _fetch(self, tenant: str, digests: PromptDigests) -> tuple[Resume | None, PrefixOutcome]:
        store, writer = self._store, self._writer
        if store is None or writer is None:
            return None, "off"
        stored = await store.find(tenant=tenant, family=digests.family)
        pending = dict(writer.pending(tenant))
        key = digests.longest({*stored, *pending}, limit=digests.num_ids - 1)
        if key is None:
            return None, "miss"
        raw_ids = digests.raw[: ID_BYTES * key.position]
        model, tokenizer = self._backend.model, self._backend.tokenizer
        waiting = pending.get(key)
        if waiting is not None and waiting.digests.raw[: len(raw_ids)] == raw_ids:
            layout = model.state_layout
            state = await asyncio.to_thread(rounded_state, layout, waiting.state, self._state_format)
            # as it will be read when it is stored
            found = Resume(state=state, position=key.position, fingerprint=model.fingerprint, generated_counts={})
            return found, "hit"
        entry = await store.load(tenant=tenant, key=key)
        if entry is None:
            return None, "miss"
        try:
            found = await asyncio.to_thread(
                decode_entry, entry, tenant=tenant, key=key, raw_ids=raw_ids, model=model, tokenizer=tokenizer
            )
        except SnapshotCorrupt as error:
            logger.warning("a stored prefix is not used: %s", error)
            writer.spawn(writer.remove(tenant, key))
            return None, "corrupt"
        return found, "hit"

    async def _save_end(
        self, writer: PrefixWriter, tenant: str, ids: tuple[int, ...], end: EndState, next_text: NextText | None
    ) -> None:
        """The state after the answer, if a later prompt can begin with its ids."""
        num_fed = end.position - len(ids)
        sampled = end.new_ids[len(end.new_ids) - num_fed - (end.pending is not None) :]
        fed = (*ids, *sampled[:num_fed])
        if next_text is not None:
            tokenizer = self._backend.tokenizer
            text = next_text(tokenizer.decode(sampled))
            again = (await asyncio.to_thread(tokenizer.encode_batch, [text]))[0]
            if (tokenizer.end_of_text_id, *again)[: end.position] != fed:
                self._metrics.prefixes.saved("other_ids")
                self._drop(end)
                return
        state: bytes | None = end.state
        holder = holder_of(self._backend)
        if end.held is not None and holder is not None:
            async with self._fetching:  # of many that end together most are dropped
                state = await holder.fetch_state(end.held) if writer.has_room(tenant) else None
            self._drop(end)
        if state is None:
            self._metrics.prefixes.saved("dropped")
        else:
            writer.add(tenant, fed, state)

    def _drop(self, end: EndState) -> None:
        holder = holder_of(self._backend)
        if end.held is not None and holder is not None:
            holder.drop_state(end.held)

    async def _sweep(self, store: PrefixStore, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            try:
                await store.remove_expired()
            except NsmError as error:
                self._breaker.failed(error)


def _positions_to_store(*, resumed: int, shared: int, end: int, min_gap: int, min_known_gap: int) -> list[int]:
    """Positions in a prompt whose states are stored: the end only `min_gap` tokens or more after the one before."""
    positions: list[int] = []
    for position, least in ((shared, min_known_gap), (end, min_gap)):
        if position - (positions[-1] if positions else resumed) >= least:
            positions.append(position)
    return positions
