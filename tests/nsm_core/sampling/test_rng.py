from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nsm_core.sampling.rng import uniform, uniforms

WORD = (1 << 64) - 1
words = st.integers(0, WORD)


def philox_4x64_10(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """The published function in plain integers: what a device implementation has to reproduce."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        low = 0xD2E7470EE14C6C93 * c0
        high = 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = (high >> 64) ^ c1 ^ k0, high & WORD, (low >> 64) ^ c3 ^ k1, low & WORD
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & WORD, (k1 + 0xBB67AE8584CAA73B) & WORD
    return c0, c1, c2, c3


def test_the_reference_gives_the_published_answers() -> None:
    assert philox_4x64_10((0, 0, 0, 0), (0, 0)) == (
        0x16554D9ECA36314C,
        0xDB20FE9D672D0FDC,
        0xD7E772CEE186176B,
        0x7E68B68AEC7BA23B,
    )


def test_golden_values() -> None:
    """These must never change: a stored session would go on with other draws."""
    draws = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2**64 - 1, 3, 123456), (5, 2**64 - 1, 2**64 - 1)]
    golden = [
        0.011546754286331562,
        0.3035680343067586,
        0.8133540609793564,
        0.5023796042735054,
        0.9870094204639804,
        0.017567556125244188,
    ]
    assert uniforms(draws).tolist() == golden
    assert [uniform(*draw) for draw in draws] == golden


@given(words, words, words)
def test_a_draw_follows_the_documented_construction(seed: int, choice_index: int, position: int) -> None:
    counter = position + 1
    first = philox_4x64_10((counter & WORD, counter >> 64, 0, 0), (seed, choice_index))[0]
    assert uniform(seed, choice_index, position) == (first >> 11) * 2.0**-53


def test_M5_uniforms_equal_single_draws() -> None:
    triples = [(seed, choice, position) for seed in (0, 7, 2**63) for choice in (0, 1) for position in range(20)]
    batched = uniforms(triples)
    assert batched.dtype == np.float64
    assert batched.tolist() == [uniform(*triple) for triple in triples]
    assert uniforms([]).shape == (0,)


def test_draws_are_uniform_along_each_argument() -> None:
    for triples in (
        [(i, 0, 0) for i in range(2000)],
        [(0, i, 0) for i in range(2000)],
        [(0, 0, i) for i in range(2000)],
    ):
        draws = uniforms(triples)
        assert draws.min() >= 0.0
        assert draws.max() < 1.0
        counts, _ = np.histogram(draws, bins=10, range=(0.0, 1.0))
        assert np.abs(counts - 200).max() < 5 * np.sqrt(200)
        assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.1
