"""Requests on smaller forms of the model, beside those on the whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from nsm_core.config import EngineConfig
from nsm_core.engine.engine import Engine
from nsm_core.engine.request import GenerationRequest, Resume
from nsm_core.engine.tiers import EngineTier
from nsm_core.errors import InvalidRequest, SnapshotCorrupt, StateMismatch
from nsm_core.execution.eager import EagerExecutor
from nsm_core.model.nsm import NsmModel
from nsm_core.model.tiers import tier_model
from nsm_core.model_info import tier_fingerprint
from nsm_core.tokenizer import Tokenizer
from tests.nsm_core.engine.harness import FINGERPRINT, make_engine, make_request, random_ids, run_all, small_model

SIZES = (2, 4)  # of 8 slots


def small_form(size: int) -> NsmModel:
    """With the whole's own output head, which random models have."""
    model = tier_model(small_model(), size)
    model.logits = small_model().logits  # type: ignore[method-assign]
    return model


@pytest.fixture
def engine(tiny_tokenizer: Tokenizer) -> Engine:
    return Engine(
        small_model(),
        tiny_tokenizer,
        fingerprint=FINGERPRINT,
        config=EngineConfig(max_slots=4, token_budget=64, queue_limit=64),
        tiers={size: EngineTier(small_form(size), EagerExecutor) for size in SIZES},
        poison=True,
    )


def on_tier(request: GenerationRequest, size: int | None, resume: Resume | None = None) -> GenerationRequest:
    return dataclasses.replace(request, num_states=size, resume=resume)


def make_requests(sizes: Sequence[int | None]) -> list[GenerationRequest]:
    return [on_tier(make_request(str(n), random_ids(n, 5 + 9 * n)), size) for n, size in enumerate(sizes)]


def test_a_batch_of_several_forms_says_what_each_says_alone(engine: Engine, tiny_tokenizer: Tokenizer) -> None:
    sizes = [2, None, 4, 2, None, 4, 2, 2]
    got = run_all(engine, make_requests(sizes), arrivals=(0, 0, 1, 2, 2, 3, 9, 9))
    for number, size in enumerate(sizes):
        model = small_model() if size is None else small_form(size)
        alone = make_engine(model, tiny_tokenizer)
        request = make_request(str(number), random_ids(number, 5 + 9 * number))
        want = run_all(alone, [request])[str(number)]
        assert got[str(number)].ids == want.ids
        assert got[str(number)].end_state.position == want.end_state.position
        assert len(got[str(number)].end_state.state) == model.state_spec.num_bytes


def test_a_state_goes_on_in_its_own_form_alone(engine: Engine) -> None:
    first = run_all(engine, make_requests([2]))["0"].end_state
    resume = Resume(
        state=first.state,
        position=first.position,
        fingerprint=tier_fingerprint(FINGERPRINT, 2),
        generated_counts=first.generated_counts,
    )
    whole = run_all(engine, [on_tier(make_request("w", (*first.new_ids, 7)), 2)])["w"]
    assert first.pending is not None
    again = run_all(engine, [on_tier(make_request("r", (first.pending, 7)), 2, resume)])["r"]
    assert again.ids == whole.ids
    for size in (None, 4):
        with pytest.raises(StateMismatch):
            engine.check(on_tier(make_request("x", (7,)), size, resume))
    with pytest.raises(SnapshotCorrupt):
        wrong = dataclasses.replace(resume, fingerprint=tier_fingerprint(FINGERPRINT, 4))
        engine.check(on_tier(make_request("x", (7,)), 4, wrong))


def test_a_form_that_there_is_not_is_refused_by_name(engine: Engine, tiny_tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match=r"num_states must be one of .* \(2, 4\), got 3") as refusal:
        engine.check(on_tier(make_request(), 3))
    assert refusal.value.param == "num_states"
    with pytest.raises(InvalidRequest, match=r"\(none\), got 4"):
        make_engine(small_model(), tiny_tokenizer).check(on_tier(make_request(), 4))


def test_stop_strings_take_a_small_state_back(engine: Engine, tiny_tokenizer: Tokenizer) -> None:
    """The state that is kept is of one run over what stayed, whatever form it has."""
    free = run_all(engine, [on_tier(make_request("a", random_ids(3, 9), max_tokens=12), 4)])["a"]
    stop = tiny_tokenizer.decode(free.ids[5:8])
    request = on_tier(make_request("b", random_ids(3, 9), max_tokens=12, stop=(stop,)), 4)
    stopped = run_all(engine, [request])["b"].end_state
    fed = stopped.new_ids[: stopped.position]
    alone = make_engine(small_form(4), tiny_tokenizer)
    want = run_all(alone, [make_request("c", fed, max_tokens=1)])["c"].end_state
    spec = small_form(4).state_spec
    for name, value in spec.unpack(stopped.state).items():
        assert abs(value - spec.unpack(want.state)[name]).max() < 2e-4


def test_all_pools_count_as_memory(engine: Engine) -> None:
    sizes = [small_model().state_spec.num_bytes, *(small_form(size).state_spec.num_bytes for size in SIZES)]
    assert engine.stats().state_pool_bytes == 4 * sum(sizes)
