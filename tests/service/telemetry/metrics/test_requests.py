"""Latencies, sizes and energy of requests, on the engine's own account."""

from __future__ import annotations

import pytest

from nsm_core.engine.request import Finished, FinishReason, Timings
from nsm_core.errors import Overloaded
from nsm_core.stats import EnergyUse
from nsm_core.tokenizer import Tokenizer
from service.backends.local import LocalBackend
from service.telemetry.metrics.metrics import Metrics
from tests.support.fake_meters import FakeMeter
from tests.support.fakes import FakeBackend
from tests.support.gateway import gateway
from tests.support.models import local_backend

PATH = "/v1/completions"


def finished(**fields: object) -> Finished:
    return Finished(reason=FinishReason.LENGTH, prompt_tokens=7, completion_tokens=4, **fields)  # type: ignore[arg-type]


def count(metrics: Metrics, name: str) -> float:
    return metrics.registry.get_sample_value(f"nsm_{name}_count") or 0.0


def total(metrics: Metrics, name: str) -> float:
    return metrics.registry.get_sample_value(f"nsm_{name}_sum") or 0.0


def test_the_engines_times_are_samples() -> None:
    metrics = Metrics(FakeBackend())
    timings = Timings(queue_s=0.5, prefill_s=0.25, decode_s=2.0)
    metrics.requests.start(arrival=0.0).finish("length", finished(timings=timings))
    names = ("queue", "prefill", "decode")
    assert [total(metrics, f"request_{name}_time_seconds") for name in names] == [0.5, 0.25, 2.0]


def test_a_request_that_only_waited_has_only_waited() -> None:
    metrics = Metrics(FakeBackend())
    metrics.requests.start(arrival=0.0).finish("abort", finished(timings=Timings(queue_s=3.0)))
    assert count(metrics, "request_queue_time_seconds") == 1
    assert count(metrics, "request_prefill_time_seconds") == count(metrics, "request_decode_time_seconds") == 0


def test_M6_energy_of_a_request_and_of_each_of_its_tokens() -> None:
    metrics = Metrics(FakeBackend())
    energy = (
        EnergyUse(source="gpu", method="nvml", joules=6.0),
        EnergyUse(source="cpu", method="rapl", joules=2.0),
    )
    metrics.requests.start(arrival=0.0).finish("length", finished(energy=energy))
    assert total(metrics, "request_energy_joules") == 8.0
    assert total(metrics, "request_energy_per_token_joules") == 2.0


@pytest.mark.parametrize(("reason", "num_tokens", "wanted"), [("length", 5, 1), ("length", 1, 0), ("error", 5, 0)])
def test_tpot_is_one_sample_for_each_request_that_ended_well(reason: str, num_tokens: int, wanted: int) -> None:
    metrics = Metrics(FakeBackend())
    record = metrics.requests.start(arrival=0.0)
    for _ in range(num_tokens):
        record.token()
    record.finish(reason, finished())  # type: ignore[arg-type]
    assert count(metrics, "time_per_output_token_seconds") == wanted
    mean_gap_s = total(metrics, "inter_token_latency_seconds") / max(1, num_tokens - 1)
    if wanted:
        assert total(metrics, "time_per_output_token_seconds") == pytest.approx(mean_gap_s)


async def test_errors_are_counted_by_code_whole_or_in_a_stream() -> None:
    backend = FakeBackend(fail_after=1, error=Overloaded("later"))
    async with gateway(backend) as server:
        await server.client.post(PATH, json={"prompt": "x"})
        await server.client.post(PATH, json={"prompt": "x", "stream": True})
        await server.client.post(PATH, json={"prompt": 3.5})
        await server.client.get("/v1/sessions/none")
        await server.client.get("/nowhere")
        for code, wanted in (
            ("overloaded", 2),
            ("invalid_request_error", 1),
            ("session_not_found", 1),
            ("not_found", 1),
        ):
            assert server.metric("nsm_errors_total", code=code) == wanted


class RisingMeter(FakeMeter):
    """A joule more at each reading."""

    def read(self) -> tuple[EnergyUse, ...]:
        self.joules += 1.0
        return super().read()


def metered(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> LocalBackend:
    init = LocalBackend.__init__
    monkeypatch.setattr(
        LocalBackend, "__init__", lambda self, *args, **fields: init(self, *args, meter=RisingMeter(), **fields)
    )
    return local_backend(tokenizer)


async def test_M6_energy_is_in_usage_on_request(tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway(metered(tiny_tokenizer, monkeypatch)) as server:
        ask = {"prompt": "x", "max_tokens": 4, "ignore_eos": True}
        silent = (await server.client.post(PATH, json=ask)).json()
        answer = (await server.client.post(PATH, json={**ask, "include_energy": True, "n": 2})).json()
        chat = await server.client.post(
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "x"}], "include_energy": True, "max_tokens": 4},
        )
        response = await server.client.post(
            "/v1/responses", json={"input": "x", "include_energy": True, "max_output_tokens": 8}
        )
        charged = server.metric("nsm_energy_charged_joules_total", source="gpu", method="nvml")
        in_all = server.metric("nsm_energy_joules_total", source="gpu", method="nvml")
    assert "energy" not in silent["usage"]
    energy = answer["usage"]["energy"]
    assert energy["joules"] > 0
    assert energy["joules_per_token"] == energy["joules"] / 8
    assert energy["sources"] == [{"source": "gpu", "method": "nvml", "joules": energy["joules"]}]
    assert chat.json()["usage"]["energy"]["joules"] > 0
    assert response.json()["usage"]["energy"]["joules"] > 0
    assert 0 < charged <= in_all


async def test_M6_a_sessions_energy_is_that_of_all_its_turns(
    tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway(metered(tiny_tokenizer, monkeypatch), is_live=True) as server:
        await server.client.post("/v1/sessions", json={"id": "s1"})
        ask = {"input": "x", "max_tokens": 4, "ignore_eos": True, "include_energy": True}
        spent = 0.0
        for turn in range(3):
            headers = {"idempotency-key": f"turn-{turn}"}
            answer = (await server.client.post("/v1/sessions/s1/generate", json=ask, headers=headers)).json()
            again = (await server.client.post("/v1/sessions/s1/generate", json=ask, headers=headers)).json()
            spent += answer["usage"]["energy"]["joules"]
            assert answer["session"]["energy_joules"] == pytest.approx(spent)
            assert again == answer  # a retry costs nothing, and is told what the first try cost
        fork = await server.client.post("/v1/sessions/s1/fork", json={"id": "s2"})
        assert fork.status_code in (200, 201)
        forked = (await server.client.post("/v1/sessions/s2/generate", json=ask)).json()
        assert forked["session"]["energy_joules"] == pytest.approx(spent + forked["usage"]["energy"]["joules"])


async def test_where_nothing_is_measured_energy_is_null() -> None:
    async with gateway(FakeBackend()) as server:
        answer = await server.client.post(PATH, json={"prompt": "x", "include_energy": True})
    assert answer.json()["usage"]["energy"] is None
