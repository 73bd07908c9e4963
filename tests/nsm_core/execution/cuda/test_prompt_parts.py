"""How prompts are divided among recorded graphs, and what those do; no graph is recorded here."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the compiler is not installed")
from nsm_core.execution.cuda import prompt_reader
from nsm_core.execution.cuda.executor import CudaExecutor
from nsm_core.execution.cuda.options import CudaOptions, CudaWeights
from nsm_core.execution.cuda.prompt_reader import ROWS, UNRECORDED_USES, PromptReader
from tests.support.interpreter import sum_products_in_one_order
from tests.support.models import random_model, small_config

HAS_GPU = torch.cuda.is_available()


class Reader(PromptReader):
    """Notes what it would read, and returns the rows."""

    def __init__(self) -> None:
        self._memory, self._rows = object(), ROWS
        self.replayed: list[tuple[tuple[int, int], int]] = []
        self.num_at_once = 0

    def _replay(self, size: tuple[int, int], rows: Sequence[int], ids: Sequence[Sequence[int]]) -> list[Tensor]:
        self.replayed.append((size, len(rows)))
        return [torch.tensor(row) for row in rows]

    def _read_at_once(self, rows: Sequence[int], ids: Sequence[Sequence[int]]) -> list[Tensor]:
        self.num_at_once += 1
        return [torch.tensor(row) for row in rows]


@pytest.mark.parametrize(
    ("number", "parts"),
    [
        (33, [((32, 64), 32), ((1, 64), 1)]),
        (95, [((32, 64), 32), ((32, 64), 32), ((32, 64), 31)]),
        (96, [((128, 64), 96)]),
        (259, [((128, 64), 128), ((128, 64), 128), ((4, 64), 3)]),
    ],
)
def test_more_short_prompts_than_a_graph_has_rows_are_read_by_several(
    number: int, parts: list[tuple[tuple[int, int], int]]
) -> None:
    reader = Reader()
    hidden = reader.read(range(number), [[1] * 45] * number)
    assert [int(row) for row in hidden] == list(range(number))
    assert reader.replayed == parts
    assert reader.num_at_once == 0


def test_sizes_that_were_not_used_are_recorded_one_by_one_short_prompts_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader, recorded, batches = Reader(), list[tuple[int, int]](), dict[tuple[int, int], types.SimpleNamespace]()

    def batch(size: tuple[int, int]) -> types.SimpleNamespace:
        return batches.setdefault(size, types.SimpleNamespace(graph=None))

    def record(size: tuple[int, int]) -> None:
        recorded.append(size)
        batch(size).graph = object()

    batch((1, 64)).graph = object()
    monkeypatch.setattr(reader, "_batch", batch)
    monkeypatch.setattr(reader, "_record", record)
    while reader.record_next():
        pass
    assert recorded[:3] == [(2, 64), (4, 64), (8, 64)]
    assert recorded[-1] == (8, 2048)
    assert not reader.record_next()
    assert len(recorded) == len(set(recorded)) == 34


def test_an_idle_engine_runs_the_plain_model_once_and_then_records_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(small_config(48, num_layers=1))
    executor = CudaExecutor(model, num_rows=2, options=CudaOptions(weights=CudaWeights.FP32, graphs=False))
    start = {name: value.clone() for name, value in executor.initial.items()}
    steps: list[torch.Size] = []
    plain = model.step

    def step(ids: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        steps.append(ids.shape)
        return plain(ids, state)

    monkeypatch.setattr(model, "step", step)
    assert not executor.prepare_more()  # nothing is recorded
    executor.options = CudaOptions(weights=CudaWeights.FP32)
    assert [executor.prepare_more() for _ in range(2)] == [True, False]
    assert steps == [torch.Size([1])]
    assert all(executor.initial[name].equal(value) for name, value in start.items())


def test_long_prompts_are_read_at_once() -> None:
    reader = Reader()
    reader.read(range(40), [[1] * 600] * 40)
    reader.read([0], [[1] * 5000])
    assert (reader.replayed, reader.num_at_once) == ([], 2)


class Replayed:
    """In place of a graph: runs its work at each replay. `record` runs it once before."""

    def __init__(self, work: Callable[[], None], *_: object, **__: object) -> None:
        self.replay = work
        work()


def test_a_recorded_batch_leaves_the_states_and_hidden_vectors_of_plain_reading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three prompts by a graph of four rows, on states that are not the start; its making changes no row."""
    if not HAS_GPU:
        sum_products_in_one_order(monkeypatch)
    monkeypatch.setattr(prompt_reader, "record", Replayed)
    model = random_model(
        small_config(48, layer_pattern="NKW" if HAS_GPU else "W", window=64, num_memory_slots=32, slot_width=32)
    )
    model.to("cuda" if HAS_GPU else "cpu")
    options = CudaOptions(weights=CudaWeights.FP32, graphs=False)
    plain, recorded = (CudaExecutor(model, num_rows=5, options=options) for _ in range(2))
    for executor in (plain, recorded):
        for row in range(5):
            executor.pool.lease(row)
        executor.pool.fill(range(5), executor.initial)
        executor.read((0, 4), ([7] * 65, [9] * 3))
    reader = recorded._prompts
    reader._memory = object()
    reader._make_hidden()
    before = [recorded.pool.pack(row) for row in range(5)]
    with torch.inference_mode():
        reader._record((4, 64))
        assert [recorded.pool.pack(row) for row in range(5)] == before
        rows, ids = (0, 3, 4), ([1, 2, 3], [4] * 64, [5])
        got, want = recorded.read(rows, ids), plain.read(rows, ids)
    assert all(one.equal(other) for one, other in zip(got, want, strict=True))
    assert [recorded.pool.pack(row) for row in range(5)] == [plain.pool.pack(row) for row in range(5)]


@pytest.mark.parametrize("weights", CudaWeights)
def test_a_size_that_is_recorded_beside_a_request_leaves_its_state_as_it_was(
    monkeypatch: pytest.MonkeyPatch, weights: CudaWeights
) -> None:
    """Steps in fp16 leave numbers that prompts, which are in bf16, round."""
    monkeypatch.setattr(prompt_reader, "record", Replayed)
    model = random_model(small_config(48, layer_pattern="KW", window=64, num_memory_slots=32, slot_width=64))
    executor = CudaExecutor(
        model.to("cuda" if HAS_GPU else "cpu"), num_rows=2, options=CudaOptions(weights=weights, graphs=False)
    )
    executor.pool.lease(0)
    executor.pool.fill((0,), executor.initial)
    for token_id in (3, 4, 5):
        executor.step((0,), (token_id,))
    before = executor.pool.pack(0)
    executor._prompts._make_hidden()
    executor._prompts._record((2, 64))
    assert executor.pool.pack(0) == before


def test_the_first_batches_of_a_size_are_read_without_recording_it(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[torch.device] = []

    def record(work: Callable[[], None], device: torch.device, **_: object) -> Replayed:
        recorded.append(device)
        return Replayed(work)

    monkeypatch.setattr(prompt_reader, "record", record)
    model = random_model(small_config(48, num_layers=1, layer_pattern="W", window=16)).to("cuda" if HAS_GPU else "cpu")
    executor = CudaExecutor(model, num_rows=2, options=CudaOptions(weights=CudaWeights.FP32, graphs=False))
    reader = executor._prompts
    reader._memory = object()
    reader._make_hidden()
    hidden, numbers = list[Tensor](), list[int]()
    for _ in range(UNRECORDED_USES + 2):
        executor.pool.lease(1)
        executor.pool.fill((1,), executor.initial)
        hidden += executor.read((1,), ([5, 6, 7],))
        executor.pool.free(1)
        numbers.append(len(recorded))
    assert numbers == [0] * UNRECORDED_USES + [1, 1]
    assert all(one.equal(hidden[0]) for one in hidden)
