from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nsm_core.errors import NumericalError
from nsm_core.sampling.counts import TokenCounts
from nsm_core.sampling.device import pack_rows
from nsm_core.sampling.params import SamplingParams
from nsm_core.sampling.result import NOT_FINITE, SampledToken
from nsm_core.sampling.rng import uniform
from nsm_core.sampling.sampler import Sampler, SamplingRow
from tests.support.counts import scaled

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 1.3},
    {"top_k": 5, "top_p": 0.9, "temperature": 0.7, "logprobs": 3},
    {"min_p": 0.05, "logprobs": 0},
    {"repetition_penalty": 1.2, "temperature": 0.9, "top_p": 0.9},
    {"presence_penalty": 0.5, "frequency_penalty": 0.3, "logprobs": 5},
    {"logit_bias": {1: 5.0, 2: -100.0}, "temperature": 0.0, "logprobs": 1},
    {"top_k": 40, "min_p": 0.02},
    {"repetition_penalty": 0.8, "temperature": 0.0},
]


def make_row(position: int = 0, counts: Mapping[int, int] | None = None, **fields: Any) -> SamplingRow:
    return SamplingRow(params=SamplingParams(**fields), position=position, generated_counts=counts or {})


def mixed_rows(num_rows: int, vocab_size: int) -> list[SamplingRow]:
    rng = np.random.default_rng(num_rows)
    rows = []
    for index in range(num_rows):
        counts = {int(token_id): int(rng.integers(1, 4)) for token_id in rng.integers(vocab_size, size=index % 9)}
        rows.append(make_row(1000 + index, counts, seed=index * 7, **KINDS[index % len(KINDS)]))
    return rows


def sample_tokens(logits: Tensor, rows: list[SamplingRow]) -> list[SampledToken]:
    sampled = Sampler().sample(logits, rows)
    assert all(isinstance(item, SampledToken) for item in sampled)
    return [item for item in sampled if isinstance(item, SampledToken)]


def ids_of(logits: Tensor, rows: list[SamplingRow]) -> list[int]:
    return [item.token_id for item in sample_tokens(logits, rows)]


def reference(logits: list[float], row: SamplingRow) -> int:
    """The documented steps in plain Python, in double precision."""
    params, counts = row.params, row.generated_counts
    scores = [x + params.logit_bias.get(i, 0.0) for i, x in enumerate(logits)]
    for i, count in counts.items():
        scores[i] = scores[i] / params.repetition_penalty if scores[i] > 0 else scores[i] * params.repetition_penalty
        scores[i] -= params.presence_penalty + params.frequency_penalty * count
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    if params.is_greedy:
        return order[0]
    weights = np.exp((np.array(scores) - scores[order[0]]) / params.temperature)
    order = order[: params.top_k or None]
    mass = np.cumsum(weights[order])
    order = order[: int(np.searchsorted(mass, params.top_p * mass[-1])) + 1]
    remaining = sorted(i for i in order if weights[i] >= params.min_p)
    target = uniform(params.seed, params.choice_index, row.position) * weights[remaining].sum()
    return remaining[int(np.searchsorted(np.cumsum(weights[remaining]), target, side="right"))]


@pytest.mark.parametrize("vocab_size", [33, 300, 8191])
@pytest.mark.parametrize("batch_size", [7, 32])
def test_M5_a_row_alone_and_in_any_batch_gives_the_same_bits(batch_size: int, vocab_size: int) -> None:
    rows = mixed_rows(batch_size, vocab_size)
    for trial in range(scaled(3, 100)):
        logits = torch.randn(batch_size, vocab_size, generator=torch.Generator().manual_seed(trial)) * (1 + trial)
        together = sample_tokens(logits, rows)
        alone = [sample_tokens(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
        assert together == alone
        assert sample_tokens(logits.flip(0), rows[::-1]) == together[::-1]


@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_the_sampler_follows_the_documented_order(scale: float) -> None:
    vocab_size, num_rows = 97, scaled(200, 5000)
    logits = torch.randn(num_rows, vocab_size) * scale
    rows = mixed_rows(num_rows, vocab_size)
    assert ids_of(logits, rows) == [reference(logits[i].tolist(), row) for i, row in enumerate(rows)]


def test_only_seed_choice_and_position_move_the_draw() -> None:
    logits = torch.zeros(1, 1000)
    base = ids_of(logits, [make_row(5, seed=1)])
    assert base == [int(uniform(1, 0, 5) * 1000)]
    assert ids_of(logits, [make_row(5, {3: 1}, seed=1, max_tokens=99, stop=("x",))]) == base
    for other in (make_row(6, seed=1), make_row(5, seed=2), make_row(5, seed=1, choice_index=1)):
        assert ids_of(logits, [other]) != base


def test_token_frequencies_equal_the_models_probabilities() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03])
    num_draws = 8000
    rows = [make_row(position, seed=3) for position in range(num_draws)]
    ids = np.array(ids_of(probabilities.log().expand(num_draws, -1), rows))
    for token_id, p in enumerate(probabilities.tolist()):
        assert abs((ids == token_id).sum() - num_draws * p) < 4 * np.sqrt(num_draws * p * (1 - p))


def test_temperature_sharpens_and_flattens() -> None:
    num_draws = 2000
    logits = torch.tensor([1.0, 0.0]).expand(num_draws, -1)
    for temperature in (0.25, 1.0, 2.0):
        rows = [make_row(position, temperature=temperature) for position in range(num_draws)]
        want = 1 / (1 + np.exp(-1 / temperature))
        assert np.mean([token_id == 0 for token_id in ids_of(logits, rows)]) == pytest.approx(want, abs=0.04)


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [2.0, 2.0, 2.0]])
    assert ids_of(logits, [make_row(temperature=0.0)] * 2) == [1, 0]


def test_greedy_sees_bias_and_penalties() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0]])
    assert ids_of(logits, [make_row(temperature=0.0, logit_bias={2: 10.0})]) == [2]
    assert ids_of(logits, [make_row(temperature=0.0, logit_bias={0: -100.0})]) == [1]
    assert ids_of(logits, [make_row(0, {0: 1}, temperature=0.0, repetition_penalty=2.0)]) == [1]
    assert ids_of(logits, [make_row(0, {0: 3}, temperature=0.0, frequency_penalty=0.5)]) == [1]
    assert ids_of(logits, [make_row(0, {0: 1, 1: 1}, temperature=0.0, presence_penalty=1.5)]) == [0]


def test_a_biased_out_token_is_never_drawn() -> None:
    rows = [make_row(position, logit_bias={0: -100.0}) for position in range(500)]
    assert 0 not in ids_of(torch.zeros(500, 4), rows)


def test_any_counts_give_the_same_token() -> None:
    logits, counts = torch.randn(1, 50), {3: 2, 7: 1}
    for kind in KINDS:
        plain, dense = (make_row(9, given, seed=5, **kind) for given in (counts, TokenCounts(50, counts)))
        assert sample_tokens(logits, [plain]) == sample_tokens(logits, [dense])


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = torch.randn(1, 50)
    want = torch.log_softmax(logits[0], dim=-1)
    row = make_row(0, {4: 1}, temperature=0.3, top_k=2, logit_bias={7: 100.0}, presence_penalty=2.0, logprobs=2)
    (sampled,) = sample_tokens(logits, [row])
    assert sampled.token_id == 7
    assert sampled.logprob is not None
    assert sampled.logprob.token_id == 7
    assert sampled.logprob.logprob == pytest.approx(want[7].item(), abs=1e-5)
    assert [token_id for token_id, _ in sampled.logprob.top] == want.topk(2).indices.tolist()
    assert sample_tokens(logits, [make_row()])[0].logprob is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_fails_alone(bad: float) -> None:
    rows = mixed_rows(12, 64)
    logits = torch.randn(12, 64)
    healthy = Sampler().sample(logits, rows)
    for broken in range(12):
        damaged = logits.clone()
        damaged[broken, 63] = bad
        sampled = Sampler().sample(damaged, rows)
        error = sampled[broken]
        assert isinstance(error, NumericalError)
        assert str(1000 + broken) in str(error)
        assert [*sampled[:broken], *sampled[broken + 1 :]] == [*healthy[:broken], *healthy[broken + 1 :]]


def test_all_rows_not_finite_is_no_accident() -> None:
    sampled = Sampler().sample(torch.full((3, 8), float("nan")), mixed_rows(3, 8))
    assert all(isinstance(item, NumericalError) for item in sampled)


def test_the_given_logits_are_not_modified() -> None:
    logits = torch.randn(10, 64)
    before = logits.clone()
    Sampler().sample(logits, mixed_rows(10, 64))
    assert torch.equal(logits, before)


def test_no_rows_give_no_tokens() -> None:
    assert Sampler().sample(torch.empty(0, 8), []) == []


def test_rows_and_requests_must_pair() -> None:
    with pytest.raises(ValueError, match="2 rows of logits for 1 requests"):
        Sampler().sample(torch.zeros(2, 8), [make_row()])


@given(st.data())
def test_a_token_outside_the_filters_is_never_drawn(data: st.DataObject) -> None:
    logits = data.draw(st.lists(st.floats(-80, 80, width=32), min_size=1, max_size=30))
    top_k = data.draw(st.integers(1, 30))
    row = make_row(
        data.draw(st.integers(0, 2**40)),
        top_k=top_k,
        top_p=data.draw(st.floats(0.001, 1.0)),
        min_p=data.draw(st.floats(0.0, 1.0)),
        temperature=data.draw(st.floats(0.01, 2.0)),
        seed=data.draw(st.integers(0, 2**64 - 1)),
    )
    (token_id,) = ids_of(torch.tensor([logits], dtype=torch.float32), [row])
    # logits within rounding of each other are as good as equal: the temperature may make them so
    assert sum(x > logits[token_id] + 1e-4 for x in logits) < top_k


def test_greedy_rows_that_are_launched_have_the_tokens_of_rows_that_are_sampled() -> None:
    logits = torch.randn(9, 50, generator=torch.Generator().manual_seed(3))
    logits[2, 7], logits[5, 0], logits[6] = float("nan"), float("inf"), 1.0  # the last has equal ones
    rows = [make_row(index, temperature=0.0) for index in range(len(logits))]
    sampled = Sampler().sample(logits, rows)
    want = [token.token_id if isinstance(token, SampledToken) else NOT_FINITE for token in sampled]
    assert Sampler().launch(logits, rows, pack_rows(rows)).wait().tolist() == [want]
    assert want.count(NOT_FINITE) == 2
