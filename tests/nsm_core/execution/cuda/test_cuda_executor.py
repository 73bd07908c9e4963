"""What the executor for a GPU adds to the suite of all executors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nsm_core.errors import ConfigError
from nsm_core.execution.choose import choose_executor
from nsm_core.execution.cuda import options
from nsm_core.model.nsm import NsmModel
from nsm_core.tokenizer import Tokenizer
from tests.support.interpreter import sum_products_in_one_order
from tests.support.models import as_loaded, random_model, small_config

executor_module = pytest.importorskip("nsm_core.execution.cuda.executor", reason="the compiler is not installed")
from benchmarks import gpu_decode_checks as checks  # noqa: E402  imports the compiler
from nsm_core.execution.cuda.executor import CudaExecutor  # noqa: E402
from nsm_core.execution.cuda.options import CudaOptions, CudaWeights  # noqa: E402

HAS_GPU = torch.cuda.is_available()
FP32 = CudaOptions(weights=CudaWeights.FP32, graphs=HAS_GPU)


@pytest.fixture(autouse=True)
def _one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    if not HAS_GPU:
        sum_products_in_one_order(monkeypatch)


def small_model() -> NsmModel:
    return random_model(small_config(48, layer_pattern="NW", window=10)).to("cuda" if HAS_GPU else "cpu")


def keyed_model() -> NsmModel:
    """Of the least sizes that the kernels for prompts take."""
    config = small_config(48, layer_pattern="KW", num_memory_slots=32, slot_width=32, window=64)
    return random_model(config).to("cuda" if HAS_GPU else "cpu")


MODELS = pytest.mark.parametrize("make", [small_model, keyed_model])
MakeModel = Callable[[], NsmModel]


@MODELS
def test_a_row_has_the_same_bits_alone_and_among_others(make: MakeModel) -> None:
    results = list(checks.check_invariance(make(), FP32, (1, 3)))
    assert all(row["ok"] for row in results), results


def test_a_prompt_has_the_same_bits_cut_and_beside_others() -> None:
    # without a GPU the scan over slots goes through the library, whose sums depend on shapes
    config = small_config(48, layer_pattern="NW" if HAS_GPU else "W", window=64)
    model = random_model(config).to("cuda" if HAS_GPU else "cpu")
    results = list(checks.check_prompts(model, FP32, (1, 3), length=200))
    assert all(row["ok"] for row in results), results


def test_a_batch_above_the_largest_size_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module, "BUCKETS", (1, 2))
    model = small_model()
    whole, cut = CudaExecutor(model, num_rows=3, options=FP32), CudaExecutor(model, num_rows=2, options=FP32)
    checks.lease(whole, range(3), model.initial_state(3))
    checks.lease(cut, range(2), model.initial_state(2))
    hidden = whole.step((0, 1, 2), (5, 6, 7))
    assert hidden.shape == (3, 32)
    assert hidden[:2].equal(cut.step((0, 1), (5, 6)))


def test_rounding_affects_matrices_alone() -> None:
    weights = CudaExecutor(small_model(), num_rows=1, options=CudaOptions(graphs=False)).weights
    slots = weights.layers[0].mixer
    assert {weights.output.weight.dtype, slots.project.weight.dtype, weights.layers[1].up.weight.dtype} == {
        torch.bfloat16
    }
    assert {weights.embedding.dtype, slots.router.weight.dtype, slots.slots.conv.dtype} == {torch.float32}


@pytest.mark.gpu
@MODELS
@pytest.mark.parametrize("weights", list(CudaWeights))
def test_gpu_steps_stay_near_the_eager_model(weights: CudaWeights, make: MakeModel) -> None:
    results = list(checks.check_steps(make(), CudaOptions(weights=weights), num_steps=8, num_rows=5))
    assert all(row["ok"] for row in results), results


@pytest.mark.gpu
def test_on_a_gpu_prompts_of_keyed_slots_have_the_same_bits_cut_and_beside_others() -> None:
    results = list(checks.check_prompts(keyed_model(), FP32, (1, 3), length=200))
    assert all(row["ok"] for row in results), results


@pytest.mark.gpu
@MODELS
def test_on_a_gpu_graphs_give_the_bits_of_single_launches(make: MakeModel) -> None:
    results = list(checks.check_replays(make(), CudaWeights.BF16))
    assert all(row["ok"] for row in results), results


@pytest.mark.gpu
def test_on_a_gpu_products_have_the_same_bits_in_every_tile_and_every_time() -> None:
    results = list(checks.check_same_bits(small_model(), torch.bfloat16))
    assert all(row["ok"] for row in results), results


@pytest.mark.gpu
@MODELS
def test_on_a_gpu_batches_of_every_size_give_the_same_bits(make: MakeModel) -> None:
    results = list(checks.check_invariance(make(), CudaOptions()))
    assert all(row["ok"] for row in results), results


@pytest.mark.skipif(HAS_GPU, reason="for machines without a GPU")
def test_without_a_gpu_it_is_refused_by_name(tiny_tokenizer: Tokenizer) -> None:
    loaded = as_loaded(small_model(), tiny_tokenizer)
    with pytest.raises(ConfigError, match="executor for GPUs: it is not on a GPU"):
        choose_executor(loaded, "cuda")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"num_memory_slots": 1025}, "must fit into registers"),
        ({"layer_pattern": "A", "max_context": 20000}, "larger than 16384"),
        ({"projector": "hybrid"}, "it reads slots by the projector hybrid, the kernels by attention alone"),
        ({"layer_pattern": "A", "num_memory_slots": 1025}, None),
        ({"layer_pattern": "KW", "num_memory_slots": 128, "slot_width": 128}, None),
        ({"layer_pattern": "K", "slot_width": 32}, "it has 8 keyed slots of 32 numbers a head, each must be one of 32"),
    ],
)
def test_sizes_that_fit(changes: dict[str, Any], reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "runs_kernels", lambda _: True)
    found = options.cuda_unsupported_reason(NsmModel(small_config(48, **changes)))
    assert (found is None) if reason is None else (found is not None and reason in found)
