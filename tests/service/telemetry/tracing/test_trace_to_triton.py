"""A trace that goes on to a Triton server, in gRPC's metadata, and what comes back of the engine there."""

from __future__ import annotations

import math

from nsm_core.tokenizer import Tokenizer
from service.backends.triton.backend import TritonBackend
from tests.service.telemetry.tracing.test_traces import TRACE_ID, TRACEPARENT, Spans
from tests.support.gateway import gateway
from tests.support.triton_stand_in import StandIn, random_loaded, stand_ins

PATH = "/v1/completions"


async def test_the_servers_part_belongs_to_the_generations_span(tiny_tokenizer: Tokenizer) -> None:
    spans = Spans()
    server = StandIn(random_loaded(tiny_tokenizer))
    async with stand_ins(server), gateway(TritonBackend([server.url], wait_s=5.0), tracing=spans.tracing) as made:
        body = {"prompt": "x", "max_tokens": 3, "ignore_eos": True}
        await made.client.post(PATH, json=body, headers={"traceparent": TRACEPARENT})
    (generation,) = [span for span in spans.all if span.name.startswith("text_completion")]
    assert [trace for asked, trace in server.traces if asked == "generate"] == [
        f"00-{TRACE_ID}-{generation.context.span_id:016x}-01"
    ]
    assert {trace for asked, trace in server.traces if asked != "generate"} == {None}  # heartbeats are nobody's
    phases = [span.name for span in spans.all if span.parent and span.parent.span_id == generation.context.span_id]
    assert phases == ["engine queue", "engine prefill", "engine decode"]


async def test_M6_gateway_reports_the_energy_of_its_server(tiny_tokenizer: Tokenizer) -> None:
    server = StandIn(random_loaded(tiny_tokenizer), energy=True)
    async with stand_ins(server), gateway(TritonBackend([server.url], wait_s=5.0)) as made:
        body = {"prompt": "x", "max_tokens": 30, "ignore_eos": True, "include_energy": True}
        answers = [(await made.client.post(PATH, json=body)).json() for _ in range(2)]
        reported = [answer["usage"]["energy"] for answer in answers]
        stats = made.services.backend.stats()
    for energy in reported:
        assert energy["joules"] > 0
        assert math.isclose(energy["joules_per_token"], energy["joules"] / 30)
        assert math.isclose(energy["joules"], sum(source["joules"] for source in energy["sources"]))
    charged = sum(use.joules for use in stats.request_energy)
    assert math.isclose(charged, sum(energy["joules"] for energy in reported), rel_tol=1e-9)
