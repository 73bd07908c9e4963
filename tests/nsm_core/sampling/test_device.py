"""The kernel that samples, against the sampler of the host; in the compiler's interpreter where there is no GPU."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nsm_core.sampling import sampler as sampler_module
from nsm_core.sampling.device import pack_rows, sample_on_device
from nsm_core.sampling.masks import TokenMasks
from nsm_core.sampling.params import SamplingParams
from nsm_core.sampling.result import NOT_FINITE, SampledToken
from nsm_core.sampling.sampler import Sampler, SamplingRow
from nsm_core.state.to_device import to_device
from tests.support.counts import scaled

kernel_module = pytest.importorskip("nsm_core.sampling.kernel", reason="the kernels' compiler is not installed")
choose_of_many = pytest.importorskip("nsm_core.sampling.large_kernel").choose_of_many

# NumPy, in which the interpreter computes, says what a GPU does in silence
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

params = st.builds(
    SamplingParams,
    temperature=st.sampled_from((0.0, 0.2, 1.0, 2.0)),
    top_p=st.sampled_from((1.0, 0.95, 0.5, 0.01)),
    top_k=st.sampled_from((0, 1, 7, 1000)),
    min_p=st.sampled_from((0.0, 0.1, 1.0)),
    seed=st.integers(0, 2**64 - 1),
    choice_index=st.integers(0, 2**64 - 1),
)
rows = st.builds(SamplingRow, params=params, position=st.integers(0, 2**62), generated_counts=st.just({}))


def on_host(logits: Tensor, wanted: list[SamplingRow], masks: TokenMasks | None = None) -> list[int]:
    tokens = Sampler().sample(logits.cpu(), wanted, masks)
    return [token.token_id for token in tokens if isinstance(token, SampledToken)]


@settings(max_examples=scaled(15, 300), deadline=None)
@given(
    wanted=st.lists(rows, min_size=1, max_size=4),
    vocab=st.integers(1, 300),
    levels=st.sampled_from((0, 3, 40)),
    seed=st.integers(0, 999),
)
def test_device_draws_equal_host_draws(wanted: list[SamplingRow], vocab: int, levels: int, seed: int) -> None:
    """Equal logits too: of equal weights the lowest ids stay, and the lowest of the largest wins."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(len(wanted), vocab, generator=generator)
    if levels:
        logits = torch.randint(levels, logits.shape, generator=generator).float() / 4
    assert sample_on_device(logits.to(DEVICE), wanted) == on_host(logits, wanted)


def in_tiles(logits: Tensor, wanted: list[SamplingRow], masks: TokenMasks | None = None) -> list[int | None]:
    """By the kernel for large vocabularies, with small tiles."""
    words = None if masks is None else to_device(masks.dense(*logits.shape), torch.device(DEVICE))
    packed = to_device(pack_rows(wanted), torch.device(DEVICE))
    ids = choose_of_many(logits.to(DEVICE), packed, words, tile=32).tolist()
    return [None if token_id == NOT_FINITE else token_id for token_id in ids]


@settings(max_examples=scaled(5, 300), deadline=None)
@given(
    wanted=st.lists(rows, min_size=1, max_size=2),
    vocab=st.integers(1, 150),
    levels=st.sampled_from((0, 3, 40)),
    is_masked=st.booleans(),
    seed=st.integers(0, 999),
)
def test_draws_in_tiles_equal_host_draws(
    wanted: list[SamplingRow], vocab: int, levels: int, is_masked: bool, seed: int
) -> None:
    """Equal weights lie in several tiles, and tiles without a token that is allowed."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(len(wanted), vocab, generator=generator)
    if levels:
        logits = torch.randint(levels, logits.shape, generator=generator).float() / 4
    masks = None
    if is_masked:
        rng = np.random.default_rng(seed)
        words = rng.integers(-(2**31), 2**31, (len(wanted), -(-vocab // 32)), dtype=np.int64).astype(np.int32)
        words[:, 0] |= 1
        words[:, 2:8] = 0
        masks = TokenMasks(np.arange(len(wanted)), words)
    assert in_tiles(logits, wanted, masks) == on_host(logits, wanted, masks)


def test_a_vocabulary_beyond_one_programs_registers_is_drawn_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_module, "LARGEST_ROW", 40)
    logits = torch.randn(4, 100)
    logits[2, 70] = torch.nan
    wanted = [row(seed=1), row(temperature=0.0), row(seed=3), row(seed=4, top_k=3, top_p=0.9, min_p=0.05)]
    got = sample_on_device(logits.to(DEVICE), wanted)
    want = Sampler().sample(logits, wanted)
    assert got == [token.token_id if isinstance(token, SampledToken) else None for token in want]
    greedy = [row(temperature=0.0)] * 4
    assert sample_on_device(logits.to(DEVICE), greedy)[:2] == logits.argmax(dim=1).tolist()[:2]


@settings(max_examples=scaled(15, 300), deadline=None)
@given(
    wanted=st.lists(rows, min_size=1, max_size=4),
    vocab=st.integers(1, 300),
    missing_words=st.integers(0, 2),
    share=st.sampled_from((0.0, 0.02, 0.5)),
    seed=st.integers(0, 999),
)
def test_device_masks_equal_host_masks(
    wanted: list[SamplingRow], vocab: int, missing_words: int, share: float, seed: int
) -> None:
    """Masks of some rows, forced tokens, and masks whose last words are missing among them."""
    rng = np.random.default_rng(seed)
    num_words = max(1, -(-vocab // 32) - missing_words)
    allowed = rng.random((len(wanted), 32 * num_words)) < share
    allowed[np.arange(len(wanted)), rng.integers(0, min(vocab, 32 * num_words), len(wanted))] = True
    allowed[:, vocab:] = False
    words = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
    indices = np.flatnonzero(rng.random(len(wanted)) < 0.7)
    masks = TokenMasks(indices, words[indices])
    logits = 3 * torch.randn(len(wanted), vocab, generator=torch.Generator().manual_seed(seed))
    got = sample_on_device(logits.to(DEVICE), wanted, masks)
    assert got == on_host(logits, wanted, masks)
    assert all(allowed[index, got[index]] for index in indices.tolist())


def row(**params: object) -> SamplingRow:
    return SamplingRow(params=SamplingParams(**params), position=9, generated_counts={})  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_fails_alone(temperature: float, bad: float) -> None:
    logits = torch.randn(3, 50, device=DEVICE)
    logits[1, 7] = bad
    got = sample_on_device(logits, [row(temperature=temperature)] * 3)
    assert [token is None for token in got] == [False, True, False]


def test_a_tiny_temperature_is_greedy() -> None:
    logits = torch.randn(2, 50, device=DEVICE)
    assert sample_on_device(logits, [row(temperature=1e-300)] * 2) == logits.argmax(dim=1).tolist()


def test_rows_that_are_adjusted_are_sampled_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities, bias and penalties need the logits there; results stay in the order of the rows."""
    wanted = [
        row(seed=1),
        row(seed=2, logprobs=2),
        row(seed=3, logit_bias={4: 50.0}),
        dataclasses.replace(row(seed=4, repetition_penalty=2.0), generated_counts={3: 1}),
        row(seed=5, repetition_penalty=2.0),
        row(temperature=0.0),
        row(seed=6, min_tokens=3),
        row(seed=7, min_tokens=3, logprobs=1),
    ]
    logits = torch.randn(8, 40)
    words = np.array([[0b1010, 0], [0, 0b1100]], np.int32)
    masks = TokenMasks(np.array([6, 7]), words)
    want = Sampler().sample(logits.clone(), wanted, masks)
    on_device: list[tuple[int, list[int]]] = []

    def count(logits: Tensor, rows: list[SamplingRow], masks: TokenMasks) -> list[int | None]:
        on_device.append((len(rows), masks.indices.tolist()))
        return sample_on_device(logits, rows, masks)

    monkeypatch.setattr(sampler_module, "runs_kernels", lambda _: True)
    monkeypatch.setattr(sampler_module, "sample_on_device", count)
    assert Sampler().sample(logits.to(DEVICE), wanted, masks) == want
    assert on_device == [(3, [2])]
