"""A span for each engine request, with the engine's phases as spans inside."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable

from opentelemetry import trace
from opentelemetry.trace import Span, StatusCode, Tracer

from nsm_core.engine.request import Event, Finished, FinishReason, GenerationRequest, Timings, TokenEvent, joules_of
from service.backends.base import Generation, InferenceBackend
from service.backends.delegating import DelegatingBackend

NS_PER_S = 1_000_000_000
CHAT = ("chatcmpl-", "resp_")  # prefixes of the request ids of conversations


class TracedBackend(DelegatingBackend):
    """Wraps a backend. Its calls to other servers belong to the same trace."""

    def __init__(self, backend: InferenceBackend, tracer: Tracer) -> None:
        super().__init__(backend)
        self._tracer = tracer

    def submit(self, request: GenerationRequest) -> TracedGeneration:
        operation = "chat" if request.request_id.startswith(CHAT) else "text_completion"
        span = self._tracer.start_span(f"{operation} {self.model.name}")
        span.set_attributes(_request_attributes(request, operation, self.model.name))
        try:
            with trace.use_span(span, end_on_exit=False, record_exception=False, set_status_on_exception=False):
                generation = self._backend.submit(request)
        except Exception as error:
            span.set_attribute("error.type", type(error).__name__)
            span.set_status(StatusCode.ERROR)
            span.end()
            raise
        return TracedGeneration(generation, span, self._tracer)


class TracedGeneration:
    """A generation whose span ends with its last event, or when it is cancelled, since nobody may read on."""

    def __init__(self, generation: Generation, span: Span, tracer: Tracer) -> None:
        self._generation = generation
        self._span = span
        self._tracer = tracer
        self._num_tokens = 0

    async def events(self) -> AsyncIterator[Event]:
        async for event in self._generation.events():
            self._note((event,))
            yield event

    async def batches(self) -> AsyncIterator[list[Event]]:
        async for batch in self._generation.batches():
            self._note(batch)
            yield batch

    def cancel(self) -> None:
        self._generation.cancel()
        if self._span.is_recording():
            self._span.set_attribute("gen_ai.usage.output_tokens", self._num_tokens)
            self._span.set_attribute("gen_ai.response.finish_reasons", [FinishReason.ABORT.value])
            self._span.end()

    def _note(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, TokenEvent):
                self._num_tokens += 1
            elif isinstance(event, Finished) and self._span.is_recording():
                self._finish(event)

    def _finish(self, finished: Finished) -> None:
        self._span.set_attributes(_end_attributes(finished))
        if finished.error is not None:
            self._span.set_attribute("error.type", type(finished.error).__name__)
            self._span.set_status(StatusCode.ERROR)
        now = time.time_ns()
        if finished.timings is not None:
            self._span_phases(finished.timings, now)
        self._span.end(now)

    def _span_phases(self, timings: Timings, now: int) -> None:
        """The engine has its own clock, so its phases are laid end to end, up to now."""
        context = trace.set_span_in_context(self._span)
        phases = [("engine queue", timings.queue_s)]
        if timings.prefill_s is not None:
            phases += [("engine prefill", timings.prefill_s), ("engine decode", timings.decode_s)]
        begin = now - round(sum(seconds for _, seconds in phases) * NS_PER_S)
        for name, seconds in phases:
            end = begin + round(seconds * NS_PER_S)
            self._tracer.start_span(name, context, start_time=begin).end(end)
            begin = end


def _request_attributes(request: GenerationRequest, operation: str, model: str) -> dict[str, str | int | float | bool]:
    """By OpenTelemetry's conventions for generative AI; no prompt."""
    sampling = request.sampling
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "nsm",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": request.request_id,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "nsm.is_resumed": request.resume is not None,
    }


def _end_attributes(finished: Finished) -> dict[str, str | int | float | list[str]]:
    attributes: dict[str, str | int | float | list[str]] = {
        "gen_ai.usage.input_tokens": finished.prompt_tokens,
        "gen_ai.usage.output_tokens": finished.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": finished.cached_tokens,
        "gen_ai.response.finish_reasons": [finished.reason.value],
    }
    timings = finished.timings
    if timings is not None:
        attributes["gen_ai.latency.time_in_queue"] = timings.queue_s
        if timings.prefill_s is not None:
            attributes["gen_ai.latency.time_to_first_token"] = timings.queue_s + timings.prefill_s
            attributes["gen_ai.latency.e2e"] = timings.queue_s + timings.prefill_s + timings.decode_s
    if finished.energy:
        attributes["nsm.energy_joules"] = joules_of((finished,))
    return attributes
