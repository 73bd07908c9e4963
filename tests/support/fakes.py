"""Stand-ins with real behaviour: they keep their contracts, so that what is tested on them holds on the real thing."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Sequence

from nsm_core.engine.request import (
    EndState,
    Event,
    Finished,
    FinishReason,
    GenerationRequest,
    NamedState,
    PromptScored,
    PromptState,
    Resume,
    TokenEvent,
    TokenLogprob,
)
from nsm_core.errors import EngineDead, NsmError, Overloaded, SnapshotCorrupt, StateMismatch
from nsm_core.grammars.compiler import CompilePool, GrammarCompiler
from nsm_core.grammars.grammar import Grammar
from nsm_core.inspection.report import LayerReport
from nsm_core.model_info import ModelInfo
from nsm_core.state.layout import TensorLayout
from nsm_core.state.report import Detail, StateReport
from nsm_core.stats import EnergyUse, EngineStats
from nsm_core.tokenizer import BpeTokenizer, IncrementalDecoder, Tokenizer

DEFAULT_SCRIPT = "It was the best of times, it was the worst of times."
STATE_LAYOUT = (TensorLayout("digest", (4,), "int64"), TensorLayout("position", (), "int64"))
STATE_BYTES = 40


@functools.cache
def tiny_tokenizer() -> Tokenizer:
    """A byte-level BPE of 300 tokens; end of text is id 0."""
    return BpeTokenizer.train([DEFAULT_SCRIPT] * 8, vocab_size=300)


def feed_state(state: bytes, ids: tuple[int, ...]) -> bytes:
    """The fake's recurrence: a hash chain over the ids, then the position. Any wrong, lost or repeated token shows."""
    digest, position = state[:32], int.from_bytes(state[32:], "little")
    for token_id in ids:
        digest = hashlib.blake2b(digest + token_id.to_bytes(4, "little"), digest_size=32).digest()
    return digest + (position + len(ids)).to_bytes(8, "little")


def state_after(ids: tuple[int, ...]) -> bytes:
    """The fake's state of an unbroken run that was fed `ids`."""
    return feed_state(bytes(STATE_BYTES), ids)


class HeldBytes:
    """The states that a fake engine holds. `lose`: as if it had been started again."""

    def __init__(self) -> None:
        self.by_number: dict[int, bytes] = {}
        self.named: dict[str, NamedState] = {}
        self._numbers = itertools.count(1)

    def hold(self, state: bytes) -> int:
        number = next(self._numbers)
        self.by_number[number] = state
        return number

    def lose(self) -> None:
        self.by_number.clear()
        self.named.clear()


class FakeBackend:
    """An InferenceBackend that "generates" a script: token i of a request is token i of `script`, then end of text,
    which stops the request and is dropped.

    `hold=True`: every token waits for a permit, given by `release`; `held` is set while a request waits for one.
    `fail_after=n`: requests end with `error` after n tokens. `refusal`: `submit` raises it; `is_full`: there
    is no room. Seeds change nothing. `replays_exactly`: what its model says of itself; it is true in any case.
    `holds_states`: whether it wants end states to stay in `states`. `energy`: what each request is said to take.
    """

    def __init__(
        self,
        script: str = DEFAULT_SCRIPT,
        *,
        tokenizer: Tokenizer | None = None,
        fingerprint: str = "fake-fingerprint",
        hold: bool = False,
        fail_after: int | None = None,
        error: NsmError | None = None,
        replays_exactly: bool = False,
        holds_states: bool = False,
        energy: tuple[EnergyUse, ...] = (),
    ) -> None:
        self.holds_states, self.states = holds_states, HeldBytes()
        self.tokenizer = tokenizer or tiny_tokenizer()
        self.model = ModelInfo(
            name="fake-nsm",
            fingerprint=fingerprint,
            numerics="fake",
            created=1_700_000_000,
            vocab_size=self.tokenizer.vocab_size,
            num_parameters=1_000,
            state_bytes=STATE_BYTES,
            state_layout=STATE_LAYOUT,
            chat_template="plain-v1",
            replays_exactly=replays_exactly,
        )
        self.script_ids: tuple[int, ...] = (*self.tokenizer.encode(script), self.tokenizer.end_of_text_id)
        self.max_requests = 272
        self.fail_after = fail_after
        self.error = error or NsmError("the fake was told to fail")
        self.energy = energy
        self.refusal: NsmError | None = None
        self.is_full = False
        self.ready = True
        self.requests: list[GenerationRequest] = []
        self.running: set[FakeGeneration] = set()
        self.num_cancels = 0
        self._compiling = CompilePool(GrammarCompiler(self.tokenizer))
        self.held = asyncio.Event()
        self._permits = asyncio.Semaphore(0)
        self._hold = hold
        self._stats = EngineStats(max_slots=16)

    def state_of(self, resume: Resume | None) -> bytes:
        """Where a request begins. Raises EngineDead."""
        if resume is None:
            return bytes(STATE_BYTES)
        state = resume.state if resume.held is None else self.states.by_number.get(resume.held)
        if state is None:
            raise EngineDead("the fake does not hold this state")
        return state

    async def fetch_state(self, number: int) -> bytes | None:
        return self.states.by_number.get(number)

    async def find_state(self, name: str) -> NamedState | None:
        return self.states.named.get(name)

    def name_state(self, name: str, number: int, about: bytes) -> None:
        self.states.named[name] = NamedState(number, about)

    def forget_state(self, name: str) -> None:
        self.states.named.pop(name, None)

    def drop_state(self, number: int) -> None:
        self.states.by_number.pop(number, None)

    async def start(self) -> None:
        self.ready = True

    async def stop(self) -> None:
        self.ready = False
        for generation in tuple(self.running):
            generation.abort()

    def require_room(self) -> None:
        if self.is_full:
            raise Overloaded("the fake is full")

    def submit(self, request: GenerationRequest) -> FakeGeneration:
        if self.refusal is not None:
            raise self.refusal
        self.require_room()
        resume = request.resume
        if resume is not None and resume.fingerprint != self.model.fingerprint:
            raise StateMismatch(f"state of model {resume.fingerprint}, this is {self.model.fingerprint}")
        if resume is not None and int.from_bytes(self.state_of(resume)[32:], "little") != resume.position:
            raise SnapshotCorrupt(f"the state was not reached by feeding {resume.position} tokens")
        generation = FakeGeneration(self, request)
        self.requests.append(request)
        self.running.add(generation)
        return generation

    async def inspect_state(
        self, state: bytes | None, *, detail: Detail = Detail.LAYER, layer: int | None = None
    ) -> StateReport:
        """The fake's state has no layers."""
        position = 0 if state is None else int.from_bytes(state[32:], "little")
        return StateReport(position=position, num_bytes=STATE_BYTES, layers=())

    async def check_grammar(self, grammar: Grammar) -> None:
        """Compiled as by the real ones; the script is given all the same."""
        await self._compiling.check(grammar)

    async def inspect_text(
        self, state: bytes | None, ids: Sequence[int], *, has_tokens: bool = False
    ) -> tuple[LayerReport, ...]:
        return ()

    def is_ready(self) -> bool:
        return self.ready

    def stats(self) -> EngineStats:
        self._stats.num_running = len(self.running)
        return self._stats

    def release(self, num_tokens: int = 1) -> None:
        """Let `num_tokens` held tokens pass."""
        for _ in range(num_tokens):
            self._permits.release()

    def forget_permits(self) -> None:
        """Take back what `release` gave and nobody used."""
        self._permits = asyncio.Semaphore(0)

    def hold_on(self) -> None:
        """Hold every token from now on."""
        self._hold = True
        self.held.clear()

    def release_all(self) -> None:
        """Hold nothing from now on; requests that wait go on."""
        self._hold = False
        self.release(len(self.running))

    async def wait_for_permit(self) -> None:
        if not self._hold:
            return
        if self._permits.locked():
            self.held.set()
        await self._permits.acquire()
        self.held.clear()

    def count(self, finished: Finished) -> None:
        self._stats.tokens_generated += finished.completion_tokens
        self._stats.tokens_resumed += finished.cached_tokens
        self._stats.tokens_computed += finished.prompt_tokens - finished.cached_tokens


class FakeGeneration:
    """One request of a FakeBackend."""

    def __init__(self, backend: FakeBackend, request: GenerationRequest) -> None:
        self._backend = backend
        self._request = request
        self._aborted = asyncio.Event()

    def cancel(self) -> None:
        if not self._aborted.is_set():
            self._backend.num_cancels += 1
        self.abort()

    def abort(self) -> None:
        self._aborted.set()
        self._backend.running.discard(self)

    async def batches(self) -> AsyncIterator[list[Event]]:
        async for event in self.events():
            yield [event]

    async def events(self) -> AsyncIterator[Event]:
        backend, request = self._backend, self._request
        decoder = IncrementalDecoder(backend.tokenizer)
        sampled = list(request.sampled_ids)
        for token_id in sampled:
            decoder.feed(token_id)
        if request.prompt_logprobs is not None:
            yield PromptScored(logprobs=(None, *(self._logprob(token_id) for token_id in request.prompt_ids[1:])))
        before = self._backend.state_of(request.resume)
        for position in request.keep_states_at:
            state = feed_state(before, request.prompt_ids[:position])
            yield PromptState(position=int.from_bytes(state[32:], "little"), state=state)
        while True:
            reason = await self._reason_to_end(sampled)
            if reason is not None:
                break
            token_id = backend.script_ids[len(sampled)]
            sampled.append(token_id)
            logprob = None if request.sampling.logprobs is None else self._logprob(token_id)
            yield TokenEvent(index=len(sampled), token_id=token_id, text=decoder.feed(token_id), logprob=logprob)
        finished = self._finished(reason, sampled, decoder.flush())
        backend.running.discard(self)
        backend.count(finished)
        yield finished

    async def _reason_to_end(self, sampled: list[int]) -> FinishReason | None:
        """Why no further token comes, or None when the next one may."""
        backend, sampling = self._backend, self._request.sampling
        if sampled and sampled[-1] == backend.tokenizer.end_of_text_id:
            return FinishReason.STOP
        if len(sampled) == sampling.max_tokens:
            return FinishReason.LENGTH
        if backend.fail_after is not None and len(sampled) >= backend.fail_after:
            return FinishReason.ERROR
        permit = asyncio.ensure_future(backend.wait_for_permit())
        abort = asyncio.ensure_future(self._aborted.wait())
        try:
            await asyncio.wait((permit, abort), return_when=asyncio.FIRST_COMPLETED)
        finally:
            permit.cancel()
            abort.cancel()
        return FinishReason.ABORT if self._aborted.is_set() else None

    def _logprob(self, token_id: int) -> TokenLogprob:
        return TokenLogprob(token_id=token_id, logprob=-0.5, top=((token_id, -0.5),))

    def _finished(self, reason: FinishReason, sampled: list[int], text: str) -> Finished:
        request = self._request
        cached = request.resume.position if request.resume else 0
        num_dropped = 1 if reason is FinishReason.STOP else 0
        has_state = request.keep_state and reason in (FinishReason.STOP, FinishReason.LENGTH)
        return Finished(
            reason=reason,
            text=text,
            num_dropped_tokens=num_dropped,
            prompt_tokens=cached + len(request.prompt_ids),
            cached_tokens=cached,
            completion_tokens=len(sampled),
            end_state=self._end_state(tuple(sampled[: len(sampled) - num_dropped]), reason) if has_state else None,
            error=self._backend.error if reason is FinishReason.ERROR else None,
            energy=self._backend.energy,
        )

    def _end_state(self, visible_ids: tuple[int, ...], reason: FinishReason) -> EndState:
        """After end of text every kept token was fed (so it was found); otherwise the last was not."""
        request = self._request
        before = self._backend.state_of(request.resume)
        counts = Counter(request.resume.generated_counts if request.resume else request.generated_counts)
        counts.update(visible_ids)
        has_pending = reason is not FinishReason.STOP and bool(visible_ids)
        state = feed_state(before, (*request.prompt_ids, *(visible_ids[:-1] if has_pending else visible_ids)))
        held = self._backend.states.hold(state) if request.hold_state else None
        return EndState(
            state=state if held is None else b"",
            held=held,
            position=int.from_bytes(state[32:], "little"),
            pending=visible_ids[-1] if has_pending else None,
            new_ids=(*request.prompt_ids, *visible_ids),
            generated_counts=dict(counts),
        )
