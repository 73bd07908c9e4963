from __future__ import annotations

import numpy as np
import pytest
import torch

from nsm_core.errors import NumericalError
from nsm_core.sampling.logprobs import prompt_logprobs, token_logprob


def test_logprobs_are_the_log_softmax() -> None:
    logits = torch.randn(300) * 3
    want = torch.log_softmax(logits.double(), dim=-1)
    scored = token_logprob(logits.numpy(), 17, num_top=5)
    assert scored.token_id == 17
    assert scored.logprob == pytest.approx(want[17].item(), abs=1e-6)
    assert [token_id for token_id, _ in scored.top] == want.topk(5).indices.tolist()
    np.testing.assert_allclose([logprob for _, logprob in scored.top], want.topk(5).values, atol=1e-6)


def test_alternatives_among_equals_are_the_lowest_ids() -> None:
    logits = np.array([1.0, 2.0, 2.0, 2.0, 0.0], dtype=np.float32)
    assert [token_id for token_id, _ in token_logprob(logits, 0, num_top=2).top] == [1, 2]
    assert [token_id for token_id, _ in token_logprob(logits, 0, num_top=4).top] == [1, 2, 3, 0]


def test_more_alternatives_than_tokens_are_all_tokens() -> None:
    scored = token_logprob(np.zeros(3, dtype=np.float32), 1, num_top=20)
    assert [token_id for token_id, _ in scored.top] == [0, 1, 2]
    assert token_logprob(np.zeros(3, dtype=np.float32), 1, num_top=0).top == ()


def test_huge_logits_do_not_overflow() -> None:
    logits = np.array([3e38, -3e38, 3e38], dtype=np.float32)
    assert token_logprob(logits, 0, num_top=0).logprob == pytest.approx(-np.log(2), rel=1e-6)
    assert -7e38 < token_logprob(logits, 1, num_top=0).logprob < -5e38


@pytest.mark.parametrize("length", [1, 255, 256, 257, 600])
def test_prompt_rows_are_scored_like_single_ones(length: int) -> None:
    logits = torch.randn(length, 40)
    ids = torch.randint(40, (length,))
    scores = prompt_logprobs(logits, ids, num_top=3)
    assert scores == tuple(token_logprob(logits[t].numpy(), int(ids[t]), 3) for t in range(length))
    assert scores == prompt_logprobs(logits, ids.tolist(), num_top=3)


def test_an_empty_prompt_has_no_scores() -> None:
    assert prompt_logprobs(torch.empty(0, 40), [], num_top=3) == ()


def test_other_layouts_and_dtypes_are_read() -> None:
    logits = torch.randn(40, 6).double().t()
    assert prompt_logprobs(logits, [1] * 6, 2) == prompt_logprobs(logits.float().contiguous(), [1] * 6, 2)


def test_row_that_is_not_finite_is_an_error_with_its_position() -> None:
    logits = torch.randn(300, 10)
    logits[280, 3] = float("nan")
    with pytest.raises(NumericalError, match="prompt token 280"):
        prompt_logprobs(logits, [1] * 300, num_top=0)


def test_rows_and_tokens_must_pair() -> None:
    with pytest.raises(ValueError, match="3 rows of logits for 2 tokens"):
        prompt_logprobs(torch.zeros(3, 5), [1, 2], num_top=0)
