"""One trace from HTTP through store and engine."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from collections.abc import AsyncIterator, Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, StatusCode

from nsm_core.errors import ConfigError, DeadlineExceeded, Overloaded, StoreUnavailable
from nsm_core.tokenizer import Tokenizer
from service.stores.prefixes.keys import MIN_TOKENS
from service.telemetry.tracing.tracing import Tracing, make_tracing
from tests.support.fakes import FakeBackend
from tests.support.gateway import Gateway, gateway
from tests.support.models import local_backend
from tests.support.otlp_receiver import receiving

PATH = "/v1/completions"
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"
SECRET = "the canary sings at midnight"


class Spans(SpanExporter):
    """Those that have ended."""

    def __init__(self) -> None:
        self.all: list[ReadableSpan] = []
        self.tracing = Tracing(SimpleSpanProcessor(self))
        self._news = asyncio.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.all += spans
        self._news.set()
        return SpanExportResult.SUCCESS

    def named(self, name: str) -> ReadableSpan:
        (span,) = [span for span in self.all if span.name == name]
        return span

    async def wait_for(self, name: str) -> ReadableSpan:
        """A client may have its answer before the server has done with it."""
        async with asyncio.timeout(60):
            while name not in (span.name for span in self.all):
                self._news.clear()
                await self._news.wait()
        return self.named(name)

    def names(self) -> list[str]:
        return sorted(span.name for span in self.all)


@pytest.fixture
def spans() -> Spans:
    return Spans()


def parent_of(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


@contextlib.asynccontextmanager
async def traced(spans: Spans, backend: FakeBackend | None = None, **options: object) -> AsyncIterator[Gateway]:
    async with gateway(backend or FakeBackend(), tracing=spans.tracing, **options) as server:
        yield server


async def test_a_request_is_a_span_with_its_generation_inside(spans: Spans) -> None:
    async with traced(spans) as server:
        body = {"prompt": [1, 2, 3], "max_tokens": 5, "temperature": 0.5, "top_p": 0.25}
        response = await server.client.post(PATH, json=body, headers={"x-request-id": "mine"})
        assert response.status_code == 200
        outer, inner = spans.named(f"POST {PATH}"), spans.named("text_completion fake-nsm")
    assert outer.kind is SpanKind.SERVER
    assert parent_of(outer) is None
    assert parent_of(inner) == outer.context.span_id
    assert dict(outer.attributes or {}) == {
        "http.request.method": "POST",
        "http.route": PATH,
        "url.path": PATH,
        "http.response.status_code": 200,
        "nsm.request_id": "mine",
    }
    assert dict(inner.attributes or {}) == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "nsm",
        "gen_ai.request.model": "fake-nsm",
        "gen_ai.response.model": "fake-nsm",
        "gen_ai.response.id": f"{response.json()['id']}-0-0",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.25,
        "nsm.is_resumed": False,
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ("length",),
    }


async def test_client_trace_is_continued(spans: Spans) -> None:
    async with traced(spans) as server:
        await server.client.post(PATH, json={"prompt": "x", "n": 2}, headers={"traceparent": TRACEPARENT})
        assert len(spans.all) == 3
    assert {f"{span.context.trace_id:032x}" for span in spans.all} == {TRACE_ID}
    outer = spans.named(f"POST {PATH}")
    assert f"{parent_of(outer):016x}" == "b7ad6b7169203331"


async def test_a_client_that_does_not_want_to_be_sampled_is_not(spans: Spans) -> None:
    async with traced(spans) as server:
        headers = {"traceparent": TRACEPARENT.removesuffix("01") + "00"}
        await server.client.post(PATH, json={"prompt": "x"}, headers=headers)
    assert not spans.all


async def test_a_turn_is_one_trace_through_store_and_engine(spans: Spans) -> None:
    async with traced(spans, is_live=True) as server:
        await server.client.post("/v1/sessions", json={"id": "s1"})
        await spans.wait_for("POST /v1/sessions")
        spans.all.clear()
        body = {"input": "x", "stream": True, "max_tokens": 3}
        response = await server.client.post("/v1/sessions/s1/generate", json=body)
        assert '"error"' not in response.text
        outer = await spans.wait_for("POST /v1/sessions/{session_id}/generate")
    assert (outer.attributes or {})["gen_ai.conversation.id"] == "s1"
    assert {"store acquire", "store commit", "text_completion fake-nsm"} <= set(spans.names())
    assert len({span.context.trace_id for span in spans.all}) == 1
    acquire = spans.named("store acquire")
    assert parent_of(acquire) == outer.context.span_id
    assert dict(acquire.attributes or {}) == {"db.operation.name": "acquire", "gen_ai.conversation.id": "s1"}


async def test_the_engines_phases_are_inside_and_end_to_end(spans: Spans, tiny_tokenizer: Tokenizer) -> None:
    async with gateway(local_backend(tiny_tokenizer), tracing=spans.tracing) as server:
        await server.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
    (request,) = [span for span in spans.all if span.name.startswith("chat ")]
    phases = [spans.named(f"engine {name}") for name in ("queue", "prefill", "decode")]
    assert [parent_of(phase) for phase in phases] == [request.context.span_id] * 3
    for before, after in itertools.pairwise(phases):
        assert before.end_time == after.start_time
    assert phases[-1].end_time is not None
    assert request.end_time is not None
    assert abs(phases[-1].end_time - request.end_time) < 1000  # nanoseconds, of rounding
    attributes = request.attributes or {}
    e2e_s = attributes["gen_ai.latency.e2e"]
    assert isinstance(e2e_s, float)
    assert 0 < float(str(attributes["gen_ai.latency.time_to_first_token"])) <= e2e_s


async def test_failed_span_has_the_error_type(spans: Spans) -> None:
    backend = FakeBackend(fail_after=1, error=DeadlineExceeded("late"))
    async with traced(spans, backend, is_live=True) as server:
        assert (await server.client.post(PATH, json={"prompt": "x"})).status_code == 504
        outer, failed = await spans.wait_for(f"POST {PATH}"), spans.named("text_completion fake-nsm")
        assert failed.status.status_code is outer.status.status_code is StatusCode.ERROR
        assert (failed.attributes or {})["error.type"] == "DeadlineExceeded"
        assert (outer.attributes or {})["error.type"] == "deadline_exceeded"
        spans.all.clear()
        await server.client.post(PATH, json={"prompt": "x", "stream": True})
        streamed = await spans.wait_for(f"POST {PATH}")
        assert (streamed.attributes or {})["error.type"] == "deadline_exceeded"  # in spite of its 200
        spans.all.clear()
        backend.refusal = Overloaded("full")
        await server.client.post(PATH, json={"prompt": "x"})
        assert (spans.named("text_completion fake-nsm").attributes or {})["error.type"] == "Overloaded"


async def test_a_client_that_leaves_ends_its_spans(spans: Spans) -> None:
    backend = FakeBackend(hold=True)
    async with traced(spans, backend, is_live=True) as server:
        backend.release(2)
        async with server.client.stream("POST", PATH, json={"prompt": "x", "stream": True}) as stream:
            lines = stream.aiter_lines()
            for _ in range(3):
                await anext(lines)
        await spans.wait_for(f"POST {PATH}")
    attributes = spans.named("text_completion fake-nsm").attributes or {}
    assert attributes["gen_ai.response.finish_reasons"] == ("abort",)
    assert attributes["gen_ai.usage.output_tokens"] == 2


async def test_refusal_of_the_store_is_not_a_failed_span(spans: Spans, monkeypatch: pytest.MonkeyPatch) -> None:
    async with traced(spans) as server:
        await server.client.get("/v1/sessions/none")
        refused = spans.named("store get")
        spans.all.clear()

        async def fail(key: object) -> None:
            raise StoreUnavailable("away")

        monkeypatch.setattr(server.services.store, "get", fail)
        assert (await server.client.get("/v1/sessions/none")).status_code == 503
    assert (refused.attributes or {})["error.type"] == "NotFound"
    assert refused.status.status_code is StatusCode.UNSET


async def test_looking_for_stored_prefixes_and_keeping_them_is_part_of_the_trace(spans: Spans) -> None:
    ids = list(range(1, 2 * MIN_TOKENS))
    async with traced(spans) as server:
        first = (await server.client.post(PATH, json={"prompt": ids, "max_tokens": 1})).json()
        await server.services.prefix_resume.drain()
        put, find = spans.named("prefixes put"), spans.named("prefixes find")
        outer = spans.named(f"POST {PATH}")
        spans.all.clear()
        again = (await server.client.post(PATH, json={"prompt": [*ids, 5], "max_tokens": 1})).json()
    assert {span.context.trace_id for span in (put, find)} == {outer.context.trace_id}
    assert (find.kind, parent_of(find)) == (SpanKind.CLIENT, outer.context.span_id)
    assert dict(find.attributes or {}) == {"db.operation.name": "find"}
    assert {"prefixes find", "prefixes load"} <= set(spans.names())
    assert [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (first, again)] == [0, len(ids)]


async def test_the_documents_of_a_response_are_part_of_its_trace(spans: Spans, monkeypatch: pytest.MonkeyPatch) -> None:
    async with traced(spans) as server:
        response = (await server.client.post("/v1/responses", json={"input": "x", "max_output_tokens": 2})).json()
        outer = spans.named("POST /v1/responses")
        puts = [span for span in spans.all if span.name == "records put"]
        spans.all.clear()

        async def fail(**fields: object) -> None:
            raise StoreUnavailable("away")

        monkeypatch.setattr(server.services.records._store, "get", fail)  # type: ignore[attr-defined]
        assert (await server.client.get(f"/v1/responses/{response['id']}")).status_code == 503
        failed = spans.named("records get")
    assert {span.context.trace_id for span in puts} == {outer.context.trace_id}
    assert {dict(span.attributes or {})["db.collection.name"] for span in puts} == {"response"}
    assert (failed.attributes or {})["error.type"] == "StoreUnavailable"
    assert failed.status.status_code is StatusCode.ERROR


async def test_probes_are_not_traced(spans: Spans) -> None:
    async with traced(spans) as server:
        await server.client.get("/health/ready")
        await server.client.get("/metrics")
        assert not [name for name in spans.names() if name.startswith("GET")]


async def test_no_span_holds_text_of_a_client(spans: Spans) -> None:
    async with traced(spans, FakeBackend(SECRET), is_live=True) as server:
        await server.client.post(PATH, json={"prompt": SECRET, "max_tokens": 50})
        await server.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": SECRET}]})
        await server.client.post("/v1/responses", json={"input": SECRET, "instructions": SECRET})
        await server.client.post("/v1/sessions", json={"id": "s1"})
        await server.client.post("/v1/sessions/s1/generate", json={"input": SECRET, "temperature": SECRET})
        await server.client.post("/v1/sessions/s1/generate", json={"input": SECRET})
        await server.client.get("/v1/models", params={"api_key": SECRET}, headers={"user-agent": SECRET})
    text = "".join(span.to_json() for span in spans.all)
    assert "gen_ai.usage.output_tokens" in text
    assert "canary" not in text
    assert "midnight" not in text


async def test_without_an_endpoint_nothing_is_traced() -> None:
    async with gateway(FakeBackend()) as server:
        assert server.services.tracing is None
        assert (await server.client.post(PATH, json={"prompt": "x"})).status_code == 200


async def test_spans_reach_a_receiver_by_otlp(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url + "/")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "front")
        tracing = make_tracing()
        async with gateway(FakeBackend(), tracing=tracing, is_live=True) as server:
            headers = {"traceparent": TRACEPARENT}
            await server.client.post(PATH, json={"prompt": "x", "max_tokens": 3}, headers=headers)
        # the server has stopped: what was left is sent
        inner, outer = receiver.named("text_completion fake-nsm"), receiver.named(f"POST {PATH}")
    assert receiver.resources[0]["service.name"] == "front"
    assert inner.trace_id.hex() == outer.trace_id.hex() == TRACE_ID
    assert inner.parent_span_id == outer.span_id


async def test_unsampled_trace_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", receiver.url + "/v1/traces")
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
        monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
        tracing = make_tracing()
        async with gateway(FakeBackend(), tracing=tracing) as server:
            assert (await server.client.post(PATH, json={"prompt": "x"})).status_code == 200
            await server.client.post(PATH, json={"prompt": "x"}, headers={"traceparent": TRACEPARENT})
        assert {span.trace_id.hex() for span in receiver.spans} == {TRACE_ID}  # a client's own decision holds
        assert receiver.resources[0]["service.name"] == "nsm"


def test_traces_without_the_extra_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    with pytest.raises(ConfigError, match=r"OTEL_\w+ need the extra: pip install 'nsm-serve\[tracing\]'"):
        make_tracing()
