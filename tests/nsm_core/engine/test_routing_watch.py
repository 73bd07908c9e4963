"""Requests that ask for it are told what the states did; tokens are those of a request that does not ask."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch

from nsm_core.config import EngineConfig
from nsm_core.engine.engine import Engine
from nsm_core.engine.request import GenerationRequest, TokenEvent
from nsm_core.errors import InvalidRequest
from nsm_core.execution.base import ExecutorFactory
from nsm_core.execution.eager import EagerExecutor
from nsm_core.execution.native.executor import NativeExecutor
from nsm_core.inspection.probe import RoutingProbe
from nsm_core.inspection.routing import TOP_STATES, LayerRouting
from nsm_core.model.nsm import NsmModel
from nsm_core.state.spec import State
from nsm_core.tokenizer import Tokenizer
from tests.nsm_core.engine.harness import FINGERPRINT, make_request, random_ids, run_all, run_one
from tests.support.models import random_model, small_config


@pytest.fixture(scope="module")
def model() -> NsmModel:
    model = random_model(small_config(512, layer_pattern="NW", router="sigmoid", write_top_k=8))
    model.embedding.weight.mul_(0.3)
    return model


def engine_of(
    model: NsmModel, tokenizer: Tokenizer, *, token_budget: int = 16, executor: ExecutorFactory = EagerExecutor
) -> Engine:
    config = EngineConfig(max_slots=4, token_budget=token_budget, queue_limit=8)
    probe = RoutingProbe(model)
    return Engine(model, tokenizer, fingerprint=FINGERPRINT, config=config, executor=executor, probe=probe, poison=True)


def watched(request: GenerationRequest) -> GenerationRequest:
    return dataclasses.replace(request, include_routing=True)


def routings_of(tokens: Sequence[TokenEvent]) -> list[tuple[LayerRouting, ...]]:
    return [token.routing.layers for token in tokens if token.routing is not None]


@pytest.mark.parametrize("executor", [EagerExecutor, NativeExecutor], ids=["eager", "native"])
def test_tokens_are_those_of_a_request_that_does_not_ask(
    model: NsmModel, tiny_tokenizer: Tokenizer, executor: ExecutorFactory
) -> None:
    request = make_request("a", random_ids(0, 40))
    plain = run_one(engine_of(model, tiny_tokenizer, executor=executor), request)
    seen = run_one(engine_of(model, tiny_tokenizer, executor=executor), watched(request))
    assert seen.events == plain.events  # routing is no part of the result
    assert [token.routing.position for token in seen.tokens if token.routing] == list(range(40, 48))
    assert all(token.routing is None for token in plain.tokens)


def test_routing_equals_that_of_the_text_read_step_by_step(model: NsmModel, tiny_tokenizer: Tokenizer) -> None:
    """However the prompt was cut, and whoever shared the batch."""
    prompt = random_ids(1, 37)
    others = [make_request("b", random_ids(2, 9)), watched(make_request("c", random_ids(3, 1)))]
    outcome = run_all(engine_of(model, tiny_tokenizer), [watched(make_request("a", prompt)), *others])["a"]
    probe = RoutingProbe(model)
    with torch.inference_mode():
        start = model.initial_state(1)
        for number, layers in enumerate(routings_of(outcome.tokens)):
            fed = [*prompt, *outcome.ids[:number]]
            _, state = model(torch.tensor([fed[:-1]]), start)
            (wanted,) = probe.capture(state, [fed[-1:]])
            for one, other in zip(layers, wanted, strict=True):
                assert dict(one.write) == pytest.approx(dict(other.write), abs=2e-4)
                assert dict(one.read) == pytest.approx(dict(other.read), abs=2e-4)


def test_routing_is_captured_for_requests_that_ask_alone(model: NsmModel, tiny_tokenizer: Tokenizer) -> None:
    asks, does_not = watched(make_request("a", random_ids(1, 9))), make_request("b", random_ids(1, 9))
    results = run_all(engine_of(model, tiny_tokenizer), [asks, does_not])
    assert results["a"].ids == results["b"].ids
    assert (len(routings_of(results["a"].tokens)), len(routings_of(results["b"].tokens))) == (8, 0)


def test_layers_without_states_are_left_out_and_lists_are_short(tiny_tokenizer: Tokenizer) -> None:
    config = small_config(
        512, layer_pattern="WG(NM)", num_layers=3, num_memory_slots=24, router="sigmoid", write_top_k=24, gate_chunk=4
    )
    outcome = run_one(engine_of(random_model(config), tiny_tokenizer), watched(make_request("a", random_ids(4, 30))))
    for layers in routings_of(outcome.tokens):
        assert [(layer.layer, layer.kind) for layer in layers] == [
            ("1", "gated"),
            ("2.0", "slots"),
            ("2.1", "memory"),
        ]
        for layer in layers:
            assert len(layer.write) <= TOP_STATES
            assert [weight for _, weight in layer.write] == sorted((w for _, w in layer.write), reverse=True)
            assert all(0 < weight <= layer.num_heads for _, weight in (*layer.write, *layer.read))
            assert 0 <= layer.entropy <= 1 <= layer.states_per_token <= layer.num_states or not layer.write
    memory = [layers[-1] for layers in routings_of(outcome.tokens)]
    assert [bool(layer.write) for layer in memory] == [position % 4 == 3 for position in range(29, 37)]


def test_P10_engine_without_a_probe_refuses_include_routing(model: NsmModel, tiny_tokenizer: Tokenizer) -> None:
    config = EngineConfig(max_slots=4, token_budget=16, queue_limit=8)
    engine = Engine(model, tiny_tokenizer, fingerprint=FINGERPRINT, config=config)
    with pytest.raises(InvalidRequest, match="this model routes no tokens to memory slots") as refused:
        engine.add(watched(make_request("a")))
    assert refused.value.param == "include_routing"
    assert not engine.has_work


def test_failed_capture_costs_no_token(
    model: NsmModel, tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = run_one(engine_of(model, tiny_tokenizer), make_request("a", random_ids(1, 9)))

    def fail(*_given: object) -> None:
        raise MemoryError("no room to look")

    monkeypatch.setattr(RoutingProbe, "capture", fail)
    outcome = run_one(engine_of(model, tiny_tokenizer), watched(make_request("a", random_ids(1, 9))))
    assert outcome.ids == wanted.ids
    assert routings_of(outcome.tokens) == []
    assert "routing could not be captured" in caplog.text


# ---- beside others -------------------------------------------------------------------------------------------------


class SlowProbe(RoutingProbe):
    """A look takes a second of a clock on which all else takes none of it but what `tick` adds."""

    def __init__(self, model: NsmModel) -> None:
        super().__init__(model)
        self.now = 0.0
        self.num_looked_at: list[int] = []

    def capture(self, state: State, ids: Sequence[Sequence[int]]) -> list[tuple[LayerRouting, ...]]:
        self.num_looked_at.append(len(ids))
        self.now += 1.0
        return super().capture(state, ids)

    def tick(self) -> float:
        return self.now


def test_captures_take_a_quarter_of_the_time_and_delay_others_by_one_at_most(
    model: NsmModel, tiny_tokenizer: Tokenizer
) -> None:
    probe = SlowProbe(model)
    config = EngineConfig(max_slots=4, token_budget=64, queue_limit=8)
    engine = Engine(model, tiny_tokenizer, fingerprint=FINGERPRINT, config=config, probe=probe, clock=probe.tick)
    for name in "abc":
        engine.add(watched(make_request(name, random_ids(ord(name), 9), max_tokens=6)))
    engine.add(make_request("plain", random_ids(4, 9), max_tokens=40))
    tokens: list[str] = []
    for number in range(40):
        events = engine.step()
        tokens += [name for name, event in events if isinstance(event, TokenEvent)]
        assert tokens.count("plain") == number + 1  # in every step
        assert sum(probe.num_looked_at) == len(probe.num_looked_at)  # one at a time
        assert len(probe.num_looked_at) <= 1 + number // 4
        probe.now += 0.75
    counts = [tokens.count(name) for name in "abc"]
    assert sum(counts) == len(probe.num_looked_at) >= 7
    assert max(counts) - min(counts) <= 1  # in turns
    while engine.has_work:  # alone they wait for nobody
        before = len(probe.num_looked_at)
        tokens += [name for name, event in engine.step() if isinstance(event, TokenEvent)]
        assert len(probe.num_looked_at) == before + 1
    assert [tokens.count(name) for name in "abc"] == [6, 6, 6]


def test_deferred_request_gets_the_tokens_of_its_solo_run(model: NsmModel, tiny_tokenizer: Tokenizer) -> None:
    requests = [watched(make_request(name, random_ids(ord(name), 40))) for name in "abc"]
    alone = [run_one(engine_of(model, tiny_tokenizer, executor=NativeExecutor), request) for request in requests]
    others = [make_request("plain", random_ids(4, 9), max_tokens=30)]
    together = run_all(engine_of(model, tiny_tokenizer, executor=NativeExecutor), [*others, *requests])
    assert [together[name].ids for name in "abc"] == [outcome.ids for outcome in alone]
    assert [len(routings_of(together[name].tokens)) for name in "abc"] == [len(outcome.tokens) for outcome in alone]
