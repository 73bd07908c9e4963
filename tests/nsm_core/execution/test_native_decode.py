"""Several tokens by one call of the kernels: those of single steps and draws, to the bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from nsm_core.execution.base import DecodeInputs
from nsm_core.execution.native.executor import NativeExecutor
from nsm_core.sampling.device import pack_rows
from nsm_core.sampling.params import SamplingParams
from nsm_core.sampling.result import NOT_FINITE, SampledToken
from nsm_core.sampling.sampler import Sampler, SamplingRow
from tests.nsm_core.execution.small_models import NATIVE, VOCABULARY, make_native, open_rows

pytestmark = pytest.mark.skipif(not NATIVE, reason="the native kernels were not built: there is no C++ compiler")

ROWS = (0, 1, 3)
PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, seed=3),
    SamplingParams(temperature=1.3, top_k=20, top_p=0.9, min_p=0.01, seed=5, choice_index=2),
)


def make_inputs(
    ids: Sequence[int] = (1, 2, 3),
    *,
    rounds: int = 12,
    seconds: float = 60.0,
    end_ids: Sequence[frozenset[int]] = (frozenset(),) * 3,
    is_interrupted: bool = False,
) -> DecodeInputs:
    rows = [SamplingRow(params=params, position=1, generated_counts={}) for params in PARAMS]
    return DecodeInputs(
        ids=np.array(ids, np.int32),
        choices=pack_rows(rows),
        end_ids=end_ids,
        most_rounds=rounds,
        seconds=seconds,
        interrupt=np.array([is_interrupted], np.int32),
    )


def opened(kind: str, variant: str = "", *, num_threads: int = 1) -> NativeExecutor:
    executor = make_native(kind, variant, num_threads=num_threads)
    open_rows(executor, ROWS)
    return executor


def by_single_steps(executor: NativeExecutor, rounds: int) -> list[list[int]]:
    sampler, ids, tokens = Sampler(executor.draw, executor.mask), [1, 2, 3], list[list[int]]()
    for number in range(rounds):
        rows = [SamplingRow(params=params, position=1 + number, generated_counts={}) for params in PARAMS]
        sampled = sampler.sample(executor.logits(executor.step(ROWS, ids)), rows)
        ids = [token.token_id for token in sampled if isinstance(token, SampledToken)]
        tokens.append(ids)
    return tokens


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("kind", ["window", "keyed", "softmax"])
def test_tokens_and_states_are_those_of_single_steps(kind: str, num_threads: int) -> None:
    plain, at_once = opened(kind), opened(kind, num_threads=num_threads)
    assert at_once.decode_rounds(ROWS, make_inputs()).tolist() == by_single_steps(plain, 12)
    for row in ROWS:
        assert at_once.pool.pack(row) == plain.pool.pack(row)


@pytest.mark.parametrize("num_threads", [2, 4])
@pytest.mark.parametrize("kind", ["keyed", "window-int4", "sigmoid-fp16-states"])
def test_rows_that_threads_decode_on_their_own_have_the_same_tokens_and_states(kind: str, num_threads: int) -> None:
    """Seven rows are shared out unevenly; of four threads three have rows."""
    rows = range(7)
    inputs = dataclasses.replace(
        make_inputs(list(rows)),
        choices=pack_rows([SamplingRow(params=PARAMS[row % 3], position=1, generated_counts={}) for row in rows]),
        end_ids=[frozenset[int]()] * len(rows),
    )
    plain, shared = (make_native(kind, num_rows=7, num_threads=threads) for threads in (1, num_threads))
    for executor in (plain, shared):
        open_rows(executor, rows)
    tokens = shared.decode_rounds(rows, inputs)
    assert tokens.tolist() == plain.decode_rounds(rows, inputs).tolist()
    ids = tokens[-1].tolist()
    assert shared.step(rows, ids).equal(plain.step(rows, ids))
    for row in rows:
        assert shared.pool.pack(row) == plain.pool.pack(row)


def test_the_given_inputs_stay_as_they_are() -> None:
    inputs = make_inputs()
    before = inputs.ids.copy(), inputs.choices.copy()
    opened("window").decode_rounds(ROWS, inputs)
    assert (inputs.ids == before[0]).all()
    assert (inputs.choices == before[1]).all()


def test_it_ends_with_the_round_in_which_a_row_draws_an_end_id() -> None:
    tokens = by_single_steps(opened("window"), 12)
    end = tokens[4][1]
    first = next(number for number, ids in enumerate(tokens) if ids[1] == end)
    end_ids = (frozenset({VOCABULARY - 1}) - {ids[0] for ids in tokens}, frozenset({end}), frozenset[int]())
    found = opened("window").decode_rounds(ROWS, make_inputs(end_ids=end_ids))
    assert found.tolist() == tokens[: first + 1]


def test_somebody_who_waits_ends_it_after_one_round() -> None:
    assert len(opened("window").decode_rounds(ROWS, make_inputs(is_interrupted=True))) == 1


def test_without_time_it_makes_one_round() -> None:
    assert len(opened("window").decode_rounds(ROWS, make_inputs(seconds=0.0))) == 1


def test_a_row_that_is_not_finite_ends_it_and_leaves_the_others_alone() -> None:
    plain, broken = opened("window"), opened("window")
    broken.pool.tensors["layers.0.slots"][1] = float("nan")
    assert broken.decode_rounds(ROWS, make_inputs()).tolist() == [
        [by_single_steps(plain, 1)[0][0], NOT_FINITE, by_single_steps(opened("window"), 1)[0][2]]
    ]


def test_an_unknown_id_is_refused_and_nothing_is_read() -> None:
    executor = opened("window")
    before = executor.pool.pack(0)
    with pytest.raises(IndexError, match=f"must be below {VOCABULARY}"):
        executor.decode_rounds(ROWS, make_inputs((1, VOCABULARY, 3)))
    assert executor.pool.pack(0) == before


def test_rows_that_are_not_leased_are_refused() -> None:
    with pytest.raises(RuntimeError, match="must be leased"):
        opened("window").decode_rounds((0, 2, 3), make_inputs())
