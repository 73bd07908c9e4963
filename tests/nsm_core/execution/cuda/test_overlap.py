"""Steps of a GPU whose ids are not known when they are launched; in the compiler's interpreter where there is none."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest
import torch

from nsm_core.execution.base import Executor, NextInputs, Rounds, SequenceModel
from nsm_core.model.nsm import NsmModel
from nsm_core.sampling.device import NUM_COLUMNS, POSITION_COLUMN, pack_sampling_params
from nsm_core.sampling.params import SamplingParams
from nsm_core.sampling.result import NOT_FINITE, SKIPPED
from nsm_core.tokenizer import Tokenizer
from tests.nsm_core.engine.harness import make_engine, make_request, run_all
from tests.support.models import random_model, small_config

executor_module = pytest.importorskip("nsm_core.execution.cuda.executor", reason="the compiler is not installed")
from nsm_core.execution.cuda.executor import CudaExecutor  # noqa: E402
from nsm_core.execution.cuda.kernels.overlap import end_round, resolve_inputs  # noqa: E402
from nsm_core.execution.cuda.options import CudaOptions, CudaWeights  # noqa: E402

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
FP32 = CudaOptions(weights=CudaWeights.FP32, graphs=HAS_GPU)


def model_of(vocab_size: int) -> NsmModel:
    model = random_model(small_config(vocab_size, layer_pattern="NW", window=10))
    model.embedding.weight.mul_(0.5)
    return model.to(DEVICE).eval()


def opened(model: NsmModel, num_rows: int) -> CudaExecutor:
    executor = CudaExecutor(model, num_rows=num_rows, options=FP32)
    for row in range(num_rows):
        executor.pool.lease(row)
        executor.pool.write(row, executor.initial)
    return executor


def test_rows_read_the_sampled_id_unless_it_is_a_pausing_id() -> None:
    """In order: goes on, pauses, not finite, an id from the host, at which it would pause, goes on, padding."""
    given = torch.tensor([[4, 5, 6, 7, 8, -1], [99, 99, 99, 11, 99, 0], [2, 0, 1, -1, 0, -1]], device=DEVICE)
    pauses = torch.zeros(9, 40, dtype=torch.uint8, device=DEVICE)
    pauses[[4, 5, 7, 8], [11, 11, 11, 13]] = 1
    rows, ids = (torch.full((6,), 77, device=DEVICE) for _ in range(2))
    sampled = torch.tensor([11, NOT_FINITE, 13], device=DEVICE)
    resolve_inputs(given=given, sampled=sampled, pauses=pauses, rows=rows, ids=ids, no_row=-1)
    assert rows.tolist() == [4, -1, -1, 7, 8, -1]
    assert ids.tolist() == [13, 0, 0, 11, 11, 0]


def test_without_a_step_before_it_all_ids_are_the_hosts() -> None:
    given = torch.tensor([[2, 3], [5, 9], [-1, -1]], device=DEVICE)
    rows, ids = (torch.zeros(2, dtype=torch.int64, device=DEVICE) for _ in range(2))
    resolve_inputs(
        given=given, sampled=ids, pauses=torch.ones(4, 40, dtype=torch.uint8, device=DEVICE), rows=rows, ids=ids,
        no_row=-1,
    )  # fmt: skip
    assert (rows.tolist(), ids.tolist()) == ([2, 3], [5, 9])


@pytest.mark.parametrize("largest", [2, 8])
def test_overlapped_rows_equal_a_plain_step_and_skipped_rows_are_unchanged(
    largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one piece, and in pieces of two rows."""
    monkeypatch.setattr(executor_module, "BUCKETS", (1, 2, 4, 8)[: 2 if largest == 2 else 4])
    model = model_of(48)
    plain, ahead = opened(model, 4), opened(model, 4)
    before = [ahead.pool.pack(row) for row in range(4)]
    want = plain.step((0, 3), (21, 6))
    overlap = ahead.overlap
    assert overlap is not None
    for row, pauses in enumerate(((20,), (19, 20), (), (6,))):
        overlap.pause_at(row, (1, 2, 21, 999))
        overlap.pause_at(row, pauses)  # instead
    hidden = overlap.step(
        (0, 1, 2, 3),
        NextInputs(
            ids=np.array([0, 0, 0, 6]),
            sources=np.array([2, 0, 1, -1]),
            sampled=torch.tensor([20, NOT_FINITE, 21], device=DEVICE),
        ),
    )
    assert hidden[[0, 3]].equal(want)
    with overlap.side_stream():
        after = [ahead.pool.pack(row) for row in range(4)]
    assert [after[1], after[2]] == [before[1], before[2]]
    assert [after[0], after[3]] == [plain.pool.pack(0), plain.pool.pack(3)]


def sampling_rows(limits: list[int], number: int) -> Rounds:
    params = [SamplingParams(temperature=0.8 * (row % 2), seed=row) for row in range(len(limits))]
    choices = np.frombuffer(b"".join(map(pack_sampling_params, params)), np.int64).reshape(len(limits), -1)
    return Rounds(choices, np.array(limits), number)


def test_a_round_notes_its_tokens_and_leaves_the_next_ones_rows() -> None:
    """In order: goes on, pauses, not finite, has no token left, skipped it, padding."""
    rows = torch.tensor([4, 5, 6, 7, -1, -1], device=DEVICE)
    ids = torch.zeros_like(rows)
    chosen = torch.tensor([11, 12, NOT_FINITE, 13, 14, 15], device=DEVICE)
    pauses = torch.zeros(9, 40, dtype=torch.uint8, device=DEVICE)
    pauses[[5, 4], [12, 13]] = 1
    left = torch.tensor([3, 3, 3, 1, 3, 0], device=DEVICE)
    number, params = torch.ones_like(rows), torch.zeros(6, NUM_COLUMNS, dtype=torch.int64, device=DEVICE)
    rounds, last = torch.full((2, 8), 77, device=DEVICE), torch.zeros(8, dtype=torch.int64, device=DEVICE)
    end_round(
        rows=rows, ids=ids, chosen=chosen, params=params, left=left, number=number, rounds=rounds, last=last,
        pauses=pauses, no_row=-1, skipped=SKIPPED,
    )  # fmt: skip
    assert rows.tolist() == [4, -1, -1, -1, -1, -1]
    assert ids.tolist() == [11, 0, 0, 0, 0, 0]
    assert rounds.tolist() == [[77] * 8, [11, 12, NOT_FINITE, 13, SKIPPED, SKIPPED, 77, 77]]
    assert last.tolist() == [11, 12, NOT_FINITE, 13, SKIPPED, SKIPPED, 0, 0]
    assert (left[:4].tolist(), number.tolist()) == ([2, 2, 2, 0], [2] * 6)
    assert params[:, POSITION_COLUMN].tolist() == [1] * 6


def test_rounds_that_follow_rounds_take_their_last_ids_and_leave_out_whoever_has_ended() -> None:
    model = model_of(48)
    plain, ahead = opened(model, 3), opened(model, 3)
    overlap = ahead.overlap
    assert overlap is not None
    for row in range(3):
        overlap.pause_at(row, ())
    start = np.array([3, 4, 5])
    first = overlap.decode((0, 1, 2), NextInputs(start, np.full(3, -1), None), sampling_rows([2, 2, 2], 2))
    tokens = first.wait()
    overlap.pause_at(1, (int(tokens[1, 1]),))
    second = overlap.decode((0, 1, 2), NextInputs(start, np.arange(3), first.ids), sampling_rows([1, 1, 1], 1))
    later = second.wait()
    assert later.shape == (1, 3)
    assert later[0, 1] == SKIPPED
    for index in (0, 1, 2):
        for token_id in (start[index], tokens[0, index]):
            plain.step((index,), (int(token_id),))
    assert ahead.pool.pack(1) == plain.pool.pack(1)
    plain.step((0, 2), tokens[1, [0, 2]].tolist())
    assert [ahead.pool.pack(row) for row in (0, 2)] == [plain.pool.pack(row) for row in (0, 2)]


def test_overlap_is_off_for_vocabularies_that_the_host_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module, "LARGEST_VOCABULARY", 47)
    assert CudaExecutor(model_of(48), num_rows=1, options=FP32).overlap is None


def make_cuda(model: SequenceModel, *, num_rows: int, poison: bool) -> Executor:
    executor = CudaExecutor(cast(NsmModel, model), num_rows=num_rows, poison=poison, options=FP32)
    assert executor.overlap is not None
    executor.overlap.min_rows = 1
    return cast(Executor, executor)


def make_waiting(model: SequenceModel, *, num_rows: int, poison: bool) -> Executor:
    executor = make_cuda(model, num_rows=num_rows, poison=poison)
    cast(CudaExecutor, executor).overlap = None
    return executor


def test_R12_R15_overlapped_engine_gives_the_events_of_a_waiting_one(tiny_tokenizer: Tokenizer) -> None:
    """Prompts of one token: longer ones are read with others, by kernels whose bits depend on that."""
    model = model_of(tiny_tokenizer.vocab_size)
    requests = [
        make_request(
            str(index),
            (index,),
            max_tokens=1 + index % 3,
            temperature=index % 3 / 2,
            seed=index,
            stop_token_ids=tuple(range(index, 512, 97)),
        )
        for index in range(5)
    ]

    waiting, ahead = (
        make_engine(model, tiny_tokenizer, executor=executor, max_slots=2) for executor in (make_waiting, make_cuda)
    )
    want = run_all(waiting, requests, arrivals=(0, 0, 2))
    assert run_all(ahead, requests, arrivals=(0, 0, 2)) == want
    assert run_all(ahead, requests, arrivals=(0, 0, 2), reads_ids=tiny_tokenizer) == want
