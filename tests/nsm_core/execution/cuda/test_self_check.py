"""The check at the start passes where all is well, says what is not, and leaves no trace in the pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from nsm_core.errors import ConfigError
from nsm_core.execution import choose
from nsm_core.execution.cuda import self_check
from nsm_core.model.nsm import NsmModel
from tests.support.models import random_model, small_config

executor_module = pytest.importorskip("nsm_core.execution.cuda.executor", reason="the compiler is not installed")
import nsm_core.execution.cuda.rounds as rounds_module  # noqa: E402  imports the compiler
from nsm_core.execution.cuda.executor import CudaExecutor  # noqa: E402
from nsm_core.execution.cuda.kernels.overlap import end_round  # noqa: E402
from nsm_core.execution.cuda.options import CudaOptions, CudaWeights  # noqa: E402
from nsm_core.execution.cuda.self_check import (  # noqa: E402
    check_rounds,
    computed,
    computed_in_rounds,
    failed_check,
)

HAS_GPU = torch.cuda.is_available()
OPTIONS = CudaOptions(weights=CudaWeights.FP32, graphs=HAS_GPU)


@pytest.fixture
def model() -> NsmModel:
    return random_model(small_config(48, num_layers=1)).to("cuda" if HAS_GPU else "cpu")


def test_it_passes_and_frees_its_rows(model: NsmModel) -> None:
    executor = CudaExecutor(model, num_rows=2, options=OPTIONS)
    assert failed_check(executor, model, 48) is None
    assert executor.pool.num_leased == 0


def test_rows_that_depend_on_their_batch_are_found(model: NsmModel) -> None:
    class Leaning(CudaExecutor):
        def logits(self, hidden: Tensor) -> Tensor:
            return super().logits(hidden) + 1e-6 * len(hidden)

    reason = failed_check(Leaning(model, num_rows=2, options=OPTIONS), model, 48)
    assert reason == "row 0 of 2 has other bits than alone, or at another time"


def test_wrong_numbers_are_found_and_refused_at_the_start(model: NsmModel, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(CudaExecutor):
        def logits(self, hidden: Tensor) -> Tensor:
            return super().logits(hidden) * 1.5

    monkeypatch.setattr(executor_module, "CudaExecutor", Wrong)
    with pytest.raises(
        ConfigError, match=r"check on .* \(logits are off by 0\.5, 0\.0001 is allowed\): set the executor"
    ):
        choose._make_cuda(model, num_rows=2, poison=False, options=OPTIONS)


def test_prompts_that_are_read_wrong_are_found(model: NsmModel) -> None:
    class Wrong(CudaExecutor):
        def read(self, rows: Sequence[int], ids: Sequence[Sequence[int]]) -> list[Tensor]:
            return [hidden * 1.5 for hidden in super().read(rows, ids)]

    reason = failed_check(Wrong(model, num_rows=2, options=OPTIONS), model, 48)
    assert reason == "logits of a prompt are off by 0.5, 0.0001 is allowed"


def test_rounds_that_differ_from_steps_are_dropped_and_the_executor_goes_on_with_steps(
    model: NsmModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def ended(**given: Any) -> None:
        end_round(**given)
        given["ids"] += 1  # the next round reads another token

    monkeypatch.setattr(rounds_module, "end_round", ended)
    executor = CudaExecutor(model, num_rows=2, options=OPTIONS)
    check_rounds(executor, 48)
    assert executor.overlap is not None
    assert executor.overlap.most_rounds(2) == 0
    assert "differ from those of single steps" in caplog.text
    assert executor.pool.num_leased == 0


def test_rounds_that_equal_steps_stay(model: NsmModel) -> None:
    executor = CudaExecutor(model, num_rows=3, options=OPTIONS)
    check_rounds(executor, 48)
    assert executor.overlap is not None
    assert executor.overlap.most_rounds(3) > 1


def test_computed_bits_are_the_same_each_time_and_others_with_other_kernels(
    model: NsmModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = CudaExecutor(model, num_rows=2, options=OPTIONS)
    first = computed_in_rounds(executor, 48)
    assert computed_in_rounds(executor, 48) == first

    def ended(**given: Any) -> None:
        end_round(**given)
        given["ids"] += 1

    monkeypatch.setattr(rounds_module, "end_round", ended)
    assert HAS_GPU or computed_in_rounds(executor, 48) != first  # what was recorded stays
    monkeypatch.setattr(self_check, "PROMPT_LENGTHS", (5,))
    logits = executor.logits
    first = computed(executor, 48)
    monkeypatch.setattr(executor, "logits", lambda hidden: logits(hidden) * (1 + 2**-20))
    assert computed(executor, 48) != first
    assert executor.pool.num_leased == 0


def test_an_executor_without_rounds_has_no_bits_of_them(model: NsmModel) -> None:
    executor = CudaExecutor(model, num_rows=2, options=OPTIONS)
    assert executor.overlap is not None
    executor.overlap.rounds = None
    assert computed_in_rounds(executor, 48) == ""
