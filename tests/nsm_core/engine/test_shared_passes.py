"""Decoding rows and prompts in one call of the executor: the bits of each request alone."""

from __future__ import annotations

import functools

import pytest
from torch import Tensor

from nsm_core.config import EngineConfig
from nsm_core.engine.engine import Engine
from nsm_core.execution.native.executor import NativeExecutor
from nsm_core.tokenizer import Tokenizer
from tests.nsm_core.engine.harness import FINGERPRINT, make_request, random_ids, run_all, run_one
from tests.nsm_core.execution.small_models import NATIVE, VOCABULARY, model_of, weights_of

pytestmark = pytest.mark.skipif(not NATIVE, reason="the native kernels were not built: there is no C++ compiler")

NUM_REQUESTS = 7


class CountingExecutor(NativeExecutor):
    num_calls = 0

    def _run(self, *arguments: object) -> Tensor:
        self.num_calls += 1
        return super()._run(*arguments)  # type: ignore[arg-type]


def make_engine(tokenizer: Tokenizer, name: str, *, max_slots: int, made: list[CountingExecutor]) -> Engine:
    model = model_of(name)

    def make(*arguments: object, **options: object) -> CountingExecutor:
        factory = functools.partial(CountingExecutor, weights=weights_of(name, NATIVE[0]))
        made.append(factory(*arguments, **options))  # type: ignore[arg-type]
        return made[-1]

    config = EngineConfig(max_slots=max_slots, token_budget=24, queue_limit=64, speculation="off")
    return Engine(model, tokenizer, fingerprint=FINGERPRINT, config=config, executor=make, poison=True)


@pytest.mark.parametrize("name", ["window", "keyed"])
def test_requests_that_come_one_after_the_other_have_the_bits_of_each_alone(
    tiny_tokenizer: Tokenizer, name: str
) -> None:
    requests = []
    for number in range(NUM_REQUESTS):
        prompt = random_ids(number, 5 + 13 * number, VOCABULARY)
        requests.append(make_request(str(number), prompt, max_tokens=12, temperature=number % 2, seed=number))
    alone = make_engine(tiny_tokenizer, name, max_slots=1, made=[])
    wanted = {request.request_id: run_one(alone, request) for request in requests}
    made: list[CountingExecutor] = []
    engine = make_engine(tiny_tokenizer, name, max_slots=4, made=made)
    found = run_all(engine, requests, arrivals=range(0, 4 * NUM_REQUESTS, 4))
    for request_id, outcome in wanted.items():
        assert found[request_id].ids == outcome.ids
        assert found[request_id].end_state.state == outcome.end_state.state
    assert made[0].num_calls <= engine.stats().num_steps
