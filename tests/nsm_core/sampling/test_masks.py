"""Masks on logits: the native kernel against the reference, and the sampler under masks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nsm_core.execution.native.draw import draw_tokens
from nsm_core.execution.native.library import load_library
from nsm_core.execution.native.masks import mask_tokens
from nsm_core.sampling.masks import MaskLogits, TokenMasks, mask_reference
from nsm_core.sampling.params import SamplingParams
from nsm_core.sampling.result import SampledToken
from nsm_core.sampling.sampler import Draw, Sampler, SamplingRow, draw_reference

needs_native = pytest.mark.skipif(load_library() is None, reason="the native kernels were not built")
IMPLEMENTATIONS = [
    pytest.param(draw_reference, mask_reference, id="reference"),
    pytest.param(draw_tokens, mask_tokens, id="native", marks=needs_native),
]


def words_of(allowed: list[list[int]], vocab_size: int) -> np.ndarray:
    bits = np.zeros((len(allowed), -(-vocab_size // 32) * 32), np.uint8)
    for row, ids in enumerate(allowed):
        bits[row, ids] = 1
    return np.packbits(bits, axis=1, bitorder="little").view(np.int32)


@needs_native
@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 300, 8192])
@pytest.mark.parametrize("num_words_less", [0, 1])
def test_the_native_mask_is_the_reference_to_the_bit(vocab_size: int, num_words_less: int) -> None:
    random = np.random.default_rng(7)
    logits = random.standard_normal((5, vocab_size)).astype(np.float32)
    words = random.integers(-(2**31), 2**31, (2, -(-vocab_size // 32)), np.int32)
    words[:, : words.shape[1] // 2] = -1
    masks = TokenMasks(np.array([1, 4]), words[:, : max(1, words.shape[1] - num_words_less)])
    want, got = logits.copy(), logits.copy()
    mask_reference(want, masks)
    mask_tokens(got, masks)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(got[[0, 2, 3]], logits[[0, 2, 3]])


@pytest.mark.parametrize(("draw", "mask"), IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.5, seed=3),
        SamplingParams(temperature=1.0, top_k=40, top_p=0.9, min_p=0.01, seed=4),
        SamplingParams(temperature=0.01, logit_bias={5: 100.0}, seed=5),
    ],
)
def test_a_masked_row_has_an_allowed_token_and_the_others_keep_theirs(
    draw: Draw, mask: MaskLogits, params: SamplingParams
) -> None:
    torch.manual_seed(1)
    logits = torch.randn(6, 300) * 8
    rows = [SamplingRow(params=params, position=index, generated_counts={}) for index in range(6)]
    allowed = [[3], [200, 201, 299]]
    masks = TokenMasks(np.array([2, 5]), words_of(allowed, 300))
    plain, masked = Sampler(draw, mask).sample(logits, rows), Sampler(draw, mask).sample(logits.clone(), rows, masks)
    assert masked[2].token_id in allowed[0]
    assert masked[5].token_id in allowed[1]
    assert [masked[index] for index in (0, 1, 3, 4)] == [plain[index] for index in (0, 1, 3, 4)]


def test_log_probabilities_under_a_mask_are_those_of_the_raw_logits() -> None:
    torch.manual_seed(1)
    logits = torch.randn(1, 64)
    row = SamplingRow(params=SamplingParams(temperature=0.0, logprobs=2), position=0, generated_counts={})
    (token,) = Sampler().sample(logits, [row], TokenMasks(np.array([0]), words_of([[9]], 64)))
    assert isinstance(token, SampledToken)
    assert token.logprob is not None
    assert token.token_id == 9
    assert token.logprob.logprob == pytest.approx(torch.log_softmax(logits, -1)[0, 9].item(), abs=1e-5)


def test_a_row_that_allows_one_token_has_it() -> None:
    allowed = [[0], [31], [32], [299], [1, 2], []]
    masks = TokenMasks(np.arange(6), words_of(allowed, 300))
    assert masks.forced_ids().tolist() == [0, 31, 32, 299, -1, -1]


def test_masks_of_some_rows_follow_them_into_a_part_of_the_batch() -> None:
    masks = TokenMasks(np.array([2, 5]), np.zeros((2, 1), np.int32))
    assert masks.within([1, 2, 4, 5]).indices.tolist() == [1, 3]
