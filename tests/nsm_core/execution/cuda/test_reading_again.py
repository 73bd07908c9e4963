"""A log that is read again gives the same bits where prompts and steps have kernels of their own."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from nsm_core.config import EngineConfig
from nsm_core.engine.engine import Engine
from nsm_core.tokenizer import Tokenizer
from tests.nsm_core.engine.harness import FINGERPRINT, make_request, random_ids, resume_from, run_one
from tests.support.interpreter import sum_products_in_one_order
from tests.support.models import random_model, small_config

pytest.importorskip("nsm_core.execution.cuda.executor", reason="the compiler is not installed")
from nsm_core.execution.cuda.executor import CudaExecutor
from nsm_core.execution.cuda.options import CudaOptions, CudaWeights

HAS_GPU = torch.cuda.is_available()


@pytest.fixture(autouse=True)
def _one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    if not HAS_GPU:
        sum_products_in_one_order(monkeypatch)


def engine_of(tokenizer: Tokenizer, *, budget: int) -> Engine:
    # without a GPU the scan over slots goes through the library, whose sums depend on shapes
    config = small_config(tokenizer.vocab_size, layer_pattern="NW" if HAS_GPU else "W", window=64)
    model = random_model(config).to("cuda" if HAS_GPU else "cpu")

    def make(*args: object, **kwargs: object) -> CudaExecutor:
        options = CudaOptions(weights=CudaWeights.FP32, graphs=HAS_GPU)
        return CudaExecutor(*args, **kwargs, options=options)  # type: ignore[arg-type]

    limits = EngineConfig(max_slots=2, token_budget=budget, queue_limit=2)
    return Engine(model, tokenizer, fingerprint=FINGERPRINT, config=limits, executor=make)


@pytest.mark.parametrize("stop", [(), ("e",)], ids=["to the length", "to a stop string"])
def test_a_log_read_again_has_the_bits_of_its_turns(tiny_tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
    engine, again = engine_of(tiny_tokenizer, budget=256), engine_of(tiny_tokenizer, budget=64)
    assert engine.replays_singly
    log: list[int] = []
    spans: list[tuple[int, int]] = []
    resume = None
    pending: tuple[int, ...] = ()
    for turn, length in enumerate((65, 3)):
        new = random_ids(turn, length, tiny_tokenizer.vocab_size)
        sampled_at = ((0, 1),) if pending else ()
        request = make_request("a", (*pending, *new), resume=resume, temperature=1.0, max_tokens=3, stop=stop)
        end = run_one(engine, dataclasses.replace(request, sampled_at=sampled_at)).finished.end_state
        assert end is not None
        num_sampled = len(end.new_ids) - len(pending) - length
        log += end.new_ids[len(pending) :]
        spans.append((len(log) - num_sampled, len(log)))
        resume, pending = resume_from(end)
        fed = log[: end.position]
    request = dataclasses.replace(make_request("b", fed, max_tokens=1), sampled_at=tuple(spans))
    read = run_one(again, request).finished.end_state
    assert read is not None
    assert resume is not None
    assert read.state == resume.state


def test_an_interrupted_answer_goes_on_with_the_bits_of_its_own_steps(tiny_tokenizer: Tokenizer) -> None:
    prompt = random_ids(1, 5, tiny_tokenizer.vocab_size)
    request = make_request("a", prompt, temperature=1.0, max_tokens=6)
    whole = run_one(engine_of(tiny_tokenizer, budget=64), request)
    begun = dataclasses.replace(request, sampled_ids=tuple(whole.ids[:4]))
    rest = run_one(engine_of(tiny_tokenizer, budget=64), begun)
    assert rest.finished.end_state == whole.finished.end_state
