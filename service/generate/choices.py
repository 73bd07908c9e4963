"""Runs the engine requests of one HTTP request together: admitted together, merged, counted, cancelled together."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, cast

from nsm_core.engine.request import (
    EndState,
    Event,
    Finished,
    FinishReason,
    GenerationRequest,
    PromptState,
    SharedPrompt,
    TokenEvent,
)
from nsm_core.engine.stream_pace import Write
from nsm_core.errors import NsmError, ServerStopping
from service.backends.background import with_priority
from service.backends.base import Divertible, Generation, InferenceBackend
from service.deps import Arrival, Services
from service.generate.deltas import Delta, DeltaBuilder
from service.schemas.common import RequestSpec, SamplingFields
from service.stores.prefixes.resume import Start
from service.telemetry.metrics.metrics import Metrics
from service.telemetry.metrics.requests import RequestRecord
from service.tenants.tenants import Permit

EVENTS_AT_ONCE = 64  # most that are made into one write; a slow reader holds so much

# Makes what writes texts to the client; None: the connection cannot take them now
ShowTexts = Callable[[Sequence[str]], Write | None]


@dataclasses.dataclass(slots=True)
class Choice:
    """One admitted request. `save`: called with each state that the request asks for. `end_state`: until it is taken;
    `finished` and the deltas have none. `prompt_tokens`, `num_tokens`: read and sampled so far.
    """

    generation: Generation
    record: RequestRecord
    is_score_only: bool
    save: Callable[[PromptState | EndState], None] | None = None
    is_scored: bool = False
    finished: Finished | None = None
    end_state: EndState | None = None
    prompt_tokens: int = 0
    num_tokens: int = 0


class RequestGroup:
    """The choices of one HTTP request, in order.

    Iterate `batches` once. Call `cancel` when the group is left, also after a good end: it is idempotent and stops
    what still runs, and it is the only clean-up there is.
    """

    def __init__(
        self,
        backend: InferenceBackend,
        metrics: Metrics,
        requests: Sequence[GenerationRequest],
        *,
        permit: Permit,
        arrival: float,
        is_stream: bool,
        is_score_only: bool = False,
        savers: Sequence[Callable[[PromptState | EndState], None] | None] = (),
    ) -> None:
        """Submits all requests or none. Errors as `InferenceBackend.submit`. `permit` is left with the group.

        `is_score_only`: end each request when its prompt is scored, before any token is sampled. `savers`: for each
        request the receiver of its states, or None.
        """
        self.choices: list[Choice] = []
        self._permit = permit
        self._is_stream = is_stream
        self._tokenizer = backend.tokenizer
        self._show: ShowTexts | None = None
        try:
            for request, save in zip(requests, savers or [None] * len(requests), strict=True):
                generation = backend.submit(with_priority(request))
                record = metrics.requests.start(arrival=arrival)
                num_read = len(request.prompt_ids) + (0 if request.resume is None else request.resume.position)
                self.choices.append(Choice(generation, record, is_score_only, save, prompt_tokens=num_read))
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Stop what has not ended; never blocks."""
        self._permit.leave()
        for choice in self.choices:
            if choice.finished is None:
                choice.generation.cancel()
            choice.record.finish("abort")

    def running_usage(self, *, choices_per_prompt: int) -> dict[str, int]:
        """Counts of all choices until now; a prompt counts once."""
        prompt_tokens = sum(choice.prompt_tokens for choice in self.choices[::choices_per_prompt])
        completion_tokens = sum(choice.num_tokens for choice in self.choices)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }

    def take_end_state(self) -> EndState | None:
        """Of the first choice, once: it has megabytes, and a client that reads slowly shall not hold it twice."""
        state, self.choices[0].end_state = self.choices[0].end_state, None
        return state

    def show_by(self, show: ShowTexts) -> None:
        """Texts of tokens after the first may be shown by `show` while the reader of `batches` waits, if the only
        choice has deltas of plain text.
        """
        if len(self.choices) == 1 and not self.choices[0].is_score_only:
            self._show = show

    def _divert(self) -> None:
        generation, record, show = self.choices[0].generation, self.choices[0].record, self._show
        self._show = None
        if show is None or not hasattr(generation, "divert"):  # a check for the protocol takes far longer
            return

        def take(_ids: Sequence[int], texts: Sequence[str]) -> Write | None:
            write = show(texts)
            if write is not None:
                record.tokens(len(texts))
            return write

        cast(Divertible, generation).divert(take)

    async def batches(self) -> AsyncGenerator[list[tuple[int, Delta]], None]:
        """(choice index, delta), in order for each choice; deltas that are ready together come together.

        Raises the first error of any choice.
        """
        first_text_at: dict[int, float] = {}
        undelivered = set(range(len(self.choices))) if self._is_stream else set()
        async with contextlib.aclosing(self._merged()) as merged:
            async for batch in merged:
                shown = (
                    {index for index, delta in batch if delta.text} if len(first_text_at) < len(self.choices) else ()
                )
                for index in shown:
                    first_text_at.setdefault(index, time.monotonic())
                yield batch
                for index in undelivered.intersection(shown):  # the consumer is back: the connection has the piece
                    self.choices[index].record.delivered()
                    undelivered.discard(index)
                if self._show is not None and first_text_at:
                    self._divert()
                for index, delta in batch:
                    if delta.finished is not None:
                        self._record_end(index, delta.finished, first_text_at.get(index))

    def _record_end(self, index: int, finished: Finished, first_text_at: float | None) -> None:
        record = self.choices[index].record
        if first_text_at is not None:
            record.delivered(at=first_text_at)
        record.finish("stop" if finished.reason is FinishReason.STOP else "length", finished)

    def _merged(self) -> AsyncGenerator[list[tuple[int, Delta]], None]:
        return self._view(0) if len(self.choices) == 1 else self._all_views()

    async def _all_views(self) -> AsyncGenerator[list[tuple[int, Delta]], None]:
        # One item for each choice: a slow reader holds the others back, and their events wait in the engine's queues.
        queue: asyncio.Queue[list[tuple[int, Delta]] | Exception] = asyncio.Queue(maxsize=len(self.choices))
        pumps = [asyncio.create_task(self._pump(index, queue)) for index in range(len(self.choices))]
        try:
            num_open = len(pumps)
            while num_open:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                num_open -= item[-1][1].finished is not None
                yield item
        finally:
            for pump in pumps:
                pump.cancel()

    async def _pump(self, index: int, queue: asyncio.Queue[list[tuple[int, Delta]] | Exception]) -> None:
        try:
            async with contextlib.aclosing(self._view(index)) as batches:
                async for batch in batches:
                    await queue.put(batch)
        except Exception as error:  # raised where the batches are read
            await queue.put(error)

    async def _view(self, index: int) -> AsyncGenerator[list[tuple[int, Delta]], None]:
        """One choice's deltas; the last one carries Finished."""
        choice, view = self.choices[index], DeltaBuilder(self._tokenizer)
        async for events in choice.generation.batches():
            for start in range(0, len(events), EVENTS_AT_ONCE):
                batch: list[tuple[int, Delta]] = []
                try:
                    for event in events[start : start + EVENTS_AT_ONCE]:
                        batch += [(index, delta) for delta in _deltas(choice, view, event)]
                except Exception:
                    if batch:  # deltas before the error are shown
                        yield batch
                    raise
                if batch:
                    yield batch


def _deltas(choice: Choice, view: DeltaBuilder, event: Event) -> Sequence[Delta]:
    """The deltas of an event. Raises the error that ended the choice."""
    if isinstance(event, TokenEvent):
        if choice.is_score_only:
            return ()
        choice.num_tokens += 1
        choice.record.token()
    elif isinstance(event, Finished):
        event = final_event(event, choice)
        if event.end_state is not None and choice.save is not None:
            choice.save(event.end_state)
        choice.end_state = event.end_state
        event = choice.finished = event if event.end_state is None else dataclasses.replace(event, end_state=None)
    elif isinstance(event, PromptState):
        if choice.save is not None:
            choice.save(event)
    else:
        choice.is_scored = True
        if choice.is_score_only:
            choice.generation.cancel()
    return view.feed(event)


def submit_group(
    services: Services,
    tenant: str,
    spec: RequestSpec,
    starts: Sequence[Start],
    *,
    request_id: str,
    arrival: Arrival,
    is_stream: bool,
) -> RequestGroup:
    """All choices of all prompts; `starts`: one for each prompt. Errors as `RequestGroup` and `Tenants.enter`."""
    services.metrics.requests.body_accepted(n=spec.n, max_tokens=spec.max_tokens)
    requests = [
        start.apply(
            GenerationRequest(
                request_id=f"{request_id}-{number}-{choice_index}",
                prompt_ids=start.ids,
                sampling=spec.sampling_of(choice_index),
                prompt_logprobs=spec.prompt_logprobs,
                deadline=arrival.time + spec.timeout_s,
                include_routing=spec.include_routing,
                keep_state=spec.return_state,
                shared_prompt=SharedPrompt(f"{request_id}-{number}", spec.n) if spec.n > 1 else None,
                owner=tenant,
            )
        )
        for number, start in enumerate(starts)
        for choice_index in range(spec.n)
    ]
    return RequestGroup(
        services.backend,
        services.metrics,
        requests,
        permit=services.tenants.enter(tenant, len(requests)),
        arrival=arrival.time,
        is_stream=is_stream,
        is_score_only=spec.is_score_only,
        savers=[start.save for start in starts for _ in range(spec.n)],
    )


def chunk_usage(body: SamplingFields, group: RequestGroup, *, choices_per_prompt: int) -> dict[str, Any]:
    """The field of a chunk with choices: absent, null before a last chunk that has it, or the counts so far."""
    if body.has_running_usage:
        return {"usage": group.running_usage(choices_per_prompt=choices_per_prompt)}
    return {"usage": None} if body.has_usage_chunk else {}


def ends_of(group: RequestGroup) -> list[Finished]:
    """How each choice ended; to be asked when all deltas were read."""
    return [choice.finished for choice in group.choices if choice.finished is not None]


def final_event(event: Finished, choice: Choice) -> Finished:
    """The end as the client shall see it. Raises when there is no good end."""
    choice.finished = event
    if event.reason is FinishReason.ERROR:
        choice.record.finish("error", event)
        raise event.error or NsmError("the engine failed on this request")
    if choice.is_score_only and choice.is_scored:
        return dataclasses.replace(
            event,
            reason=FinishReason.LENGTH,
            text="",
            num_dropped_tokens=0,
            tail=b"",
            completion_tokens=0,
            stop_reason=None,
        )
    if event.reason is FinishReason.ABORT:
        # nobody here asked for it: whoever cancels a group no longer reads it
        raise ServerStopping("the server is stopping; this request was not finished")
    return event
