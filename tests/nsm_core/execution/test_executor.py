"""What every executor keeps to (nsm_core/execution/base.py), one suite against each of them."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from nsm_core.execution.base import Executor
from nsm_core.execution.eager import EagerExecutor
from nsm_core.execution.native.executor import NativeExecutor
from nsm_core.execution.native.library import variants
from nsm_core.execution.native.precision import Precision
from nsm_core.execution.rwkv7.executor import Rwkv7Executor
from nsm_core.execution.rwkv7.weights import Rwkv7Weights
from nsm_core.model.nsm import NsmModel
from nsm_core.rwkv7.model import Rwkv7Model
from nsm_core.sampling.params import SamplingParams
from nsm_core.sampling.sampler import SamplingRow, draw_reference
from nsm_core.state.spec import POSITION, State
from tests.nsm_core.execution.small_models import quantised_copy, read_by_copy
from tests.support import rwkv7
from tests.support.interpreter import sum_products_in_one_order
from tests.support.models import random_model, small_config

VOCAB = 48
TOLERANCE = 2e-4  # of benchmarks/notes/model.md

Make = Callable[..., Executor]
Model = NsmModel | Rwkv7Model


def make_cuda(model: Model, **arguments: object) -> Executor:
    from nsm_core.execution.cuda.executor import CudaExecutor
    from nsm_core.execution.cuda.options import CudaOptions, CudaWeights
    from nsm_core.execution.rwkv7.cuda.executor import Rwkv7CudaExecutor

    options = CudaOptions(weights=CudaWeights.FP32, graphs=torch.cuda.is_available())
    if isinstance(model, Rwkv7Model):
        return Rwkv7CudaExecutor(model, options=options, **arguments)  # type: ignore[arg-type]
    return CudaExecutor(model, options=options, **arguments)  # type: ignore[arg-type]


def make_native(model: Model, **arguments: object) -> Executor:
    if isinstance(model, Rwkv7Model):
        weights = Rwkv7Weights(model, Precision.FP32)
        return Rwkv7Executor(model, weights=weights, **arguments)  # type: ignore[arg-type]
    return NativeExecutor(model, **arguments)  # type: ignore[arg-type]


EXECUTORS: dict[str, Make] = {"eager": EagerExecutor}
if variants():
    EXECUTORS["native"] = make_native
if importlib.util.find_spec("triton") is not None:
    EXECUTORS["cuda"] = make_cuda


RWKV7 = "rwkv7"
CASES = [(name, pattern) for pattern in ("NW", "KW", RWKV7) for name in EXECUTORS]


@pytest.fixture(params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    """An executor, and the layers of a model that it runs, or another architecture."""
    name, pattern = request.param
    return name, pattern


@pytest.fixture(autouse=True)
def _one_order(case: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    if case[0] == "cuda" and not torch.cuda.is_available():
        sum_products_in_one_order(monkeypatch)


@pytest.fixture
def name(case: tuple[str, str]) -> str:
    return case[0]


@functools.cache
def model_of(pattern: str) -> Model:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if pattern == RWKV7:
        sizes = rwkv7.small_config(vocab_size=VOCAB, width=32, hidden=64)
        return Rwkv7Model(sizes, rwkv7.random_tensors(sizes), device)
    config = small_config(VOCAB, layer_pattern=pattern, window=10)
    return random_model(config).to(device).eval()


@pytest.fixture
def model(case: tuple[str, str]) -> Model:
    return model_of(case[1])


@pytest.fixture
def make(name: str, model: Model) -> Make:
    return functools.partial(EXECUTORS[name], model)


class Reference:
    """What an executor's numbers are compared with: the model, or for int8 the model with its inputs rounded."""

    def __init__(self, model: Model, *, is_int8: bool) -> None:
        self._is_int8 = is_int8 and isinstance(model, NsmModel)  # RWKV-7 is compared on its kernels for fp32
        self._model: Any = quantised_copy(model) if self._is_int8 else model

    def read(self, ids: Sequence[int]) -> tuple[Tensor, State]:
        """hidden [len(ids),d] and the state, of a text read alone."""
        return read_by_copy(self._model, ids) if self._is_int8 else read_alone(self._model, ids)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden.double()).float() if self._is_int8 else self._model.logits(hidden)


@pytest.fixture
def reference(name: str, model: Model) -> Reference:
    return Reference(model, is_int8=name == "native")


def random_ids(seed: int, length: int) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def open_rows(executor: Executor, rows: Sequence[int]) -> None:
    for row in rows:
        executor.pool.lease(row)
        executor.pool.write(row, executor.initial)


@torch.inference_mode()
def read_alone(model: Model, ids: Sequence[int]) -> tuple[Tensor, State]:
    """hidden [len(ids),d] and the state, by the model itself."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hidden, state = model.forward(torch.tensor([list(ids)], device=device), model.initial_state(1))
    return hidden[0], state


def assert_row(executor: Executor, row: int, want: State) -> None:
    got = executor.pool.copy(row)
    assert got[POSITION].equal(want[POSITION])
    torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE)


def test_rows_read_texts_then_single_tokens(make: Make, reference: Reference) -> None:
    """Texts of different lengths, longer and shorter than the window; rows with gaps; free rows are NaN."""
    executor = make(num_rows=6, poison=True)
    texts = {0: random_ids(0, 14), 2: random_ids(1, 3), 5: random_ids(2, 11)}
    open_rows(executor, list(texts))
    hidden = executor.read((0,), (texts[0][:12],))
    hidden += executor.read((2, 5), (texts[2][:1], texts[5][:9]))
    assert [len(rows) for rows in hidden] == [12, 1, 9]
    stepped = [
        executor.step((0, 2, 5), [texts[row][at] for row, at in zip(texts, at, strict=True)])
        for at in ((12, 1, 9), (13, 2, 10))
    ]
    for index, (row, ids) in enumerate(texts.items()):
        want, want_state = reference.read(ids)
        got = torch.cat((hidden[index], *(step[index : index + 1] for step in stepped)))
        torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE)
        torch.testing.assert_close(executor.logits(got), reference.logits(want), rtol=TOLERANCE, atol=TOLERANCE)
        assert_row(executor, row, want_state)


def test_a_step_leaves_other_rows_alone(make: Make) -> None:
    executor = make(num_rows=4)
    open_rows(executor, range(4))
    executor.read((1, 3), (random_ids(0, 4), random_ids(1, 4)))
    before = [executor.pool.pack(row) for row in range(4)]
    executor.step((0, 2), (1, 2))
    after = [executor.pool.pack(row) for row in range(4)]
    assert [a == b for a, b in zip(before, after, strict=True)] == [False, True, False, True]


def test_result_of_a_step_survives_the_next_step(make: Make) -> None:
    executor = make(num_rows=2)
    open_rows(executor, range(2))
    first = executor.step((0, 1), (1, 2))
    copy = first.clone()
    executor.step((0, 1), (3, 4))
    assert first.equal(copy)


def test_logits_are_fp32_whatever_comes_in(make: Make) -> None:
    executor = make(num_rows=1)
    open_rows(executor, (0,))
    hidden = executor.step((0,), (1,))
    logits = executor.logits(hidden)
    assert logits.shape == (1, VOCAB)
    assert logits.dtype == torch.float32
    strided = torch.stack((hidden, hidden), dim=-1)[..., 0]
    assert executor.logits(strided).equal(logits)


@pytest.mark.parametrize("rows", [(1,), (0, 1), ()], ids=str)
def test_rows_must_be_leased(make: Make, rows: tuple[int, ...]) -> None:
    executor = make(num_rows=2)
    open_rows(executor, (0,))
    with pytest.raises(RuntimeError, match="must be leased"):
        executor.step(rows, [1] * len(rows))


def test_the_start_is_the_models_own(make: Make, model: Model) -> None:
    torch.testing.assert_close(make(num_rows=1).initial, model.initial_state(1), rtol=0.0, atol=0.0)


@pytest.mark.parametrize(("num_read", "num_drafts"), [(1, 1), (3, 4), (9, 8), (14, 5), (9, 25)])
def test_R4_drafts_are_taken_back_to_the_bit(make: Make, num_read: int, num_drafts: int) -> None:
    """Around the end of the ring, and past all of it; the other row's state stays where it has come to meanwhile."""
    executor = make(num_rows=3, poison=True)
    if executor.savepoint is None:
        assert not isinstance(
            executor, NativeExecutor | Rwkv7Executor
        )  # its bits depend on how a text is cut: it takes nothing back
        return
    open_rows(executor, (0, 2))
    text, drafts = random_ids(0, num_read), random_ids(1, num_drafts)
    executor.read((0, 2), (text, text))
    before = executor.pool.pack(2)
    savepoint = executor.savepoint(2, num_drafts)
    (beside, read) = executor.read((0, 2), (drafts[:1], drafts))
    savepoint.restore()
    assert executor.pool.pack(2) == before
    one_by_one = torch.cat([executor.step((2,), (draft,)) for draft in drafts])
    assert one_by_one.equal(read)
    assert executor.logits(one_by_one).equal(executor.logits(read))
    assert executor.logits(beside).equal(executor.logits(one_by_one)[:1])
    executor.step((0,), drafts[1:2] or drafts)
    savepoint = executor.savepoint(2, num_drafts)
    executor.step((0,), drafts[:1])
    other = executor.pool.pack(0)
    savepoint.restore()
    assert executor.pool.pack(0) == other


def test_it_draws_as_the_reference_does(make: Make) -> None:
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(0)).numpy()
    params = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=7)
    rows = [SamplingRow(params=params, position=position, generated_counts={}) for position in range(4)]
    assert (
        make(num_rows=1).draw(logits, [5, 0, 3, 3], rows).tolist()
        == draw_reference(logits, [5, 0, 3, 3], rows).tolist()
    )
