from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsm_core.errors import ConfigError
from nsm_lab.evaluation.mqar.data import TEST_TASKS, TRAIN_TASKS, Task, generate


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@given(pairs=st.integers(1, 30), slack=st.integers(0, 20), seed=st.integers(0, 1000))
def test_every_sequence_obeys_the_rules(pairs: int, slack: int, seed: int) -> None:
    task = Task(4 * pairs + 2 * slack, pairs, 5)
    examples = generate(task, rng(seed), vocab_size=128)
    assert examples.ids.shape == (5, task.length)
    assert examples.ids.min() >= 0
    assert examples.ids.max() < 128
    for ids, positions, values in zip(examples.ids, examples.positions, examples.values, strict=True):
        keys = ids[0 : 2 * pairs : 2]
        assert len(set(keys)) == len(set(values)) == pairs
        assert keys.min() >= 1
        assert keys.max() < 64 <= values.min()
        assert np.array_equal(ids[1 : 2 * pairs : 2], values)  # what is asked stands beside its key
        assert np.array_equal(ids[positions], keys)
        assert len(set(positions)) == pairs
        assert positions.min() >= 2 * pairs
        assert positions.max() < task.length
        assert not (positions % 2).any()


def test_most_queries_come_soon_by_the_power_law() -> None:
    examples = generate(Task(64, 1, 20_000), rng())
    gaps = (examples.positions[:, 0] - 2) // 2
    law = np.arange(1, 32) ** (0.01 - 1)
    shares = np.bincount(gaps, minlength=31) / len(gaps)
    assert shares == pytest.approx(law / law.sum(), abs=0.01)


def test_keys_are_drawn_evenly() -> None:
    """Most draws of 15 from 15 hold a repetition at first: drawing again must prefer no order and no key."""
    keys = generate(Task(64, 15, 8000), rng(), vocab_size=32).ids[:, 0:30:2]
    for column in (0, 7, 14):
        assert np.bincount(keys[:, column], minlength=16)[1:] / 8000 == pytest.approx(np.full(15, 1 / 15), abs=0.012)


def test_a_seed_gives_the_same_examples_and_another_gives_others() -> None:
    first, again, other = (generate(TRAIN_TASKS[4], rng(seed)).ids[:50] for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_the_tasks_are_those_of_zoology() -> None:
    assert sum(task.num_examples for task in TRAIN_TASKS) == 180_000
    assert [(task.length, task.pairs) for task in TRAIN_TASKS] == [(64, 4), (128, 8), (256, 16), (256, 32), (256, 64)]
    assert [(task.length, task.pairs) for task in TEST_TASKS] == [
        (64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 128), (1024, 256)
    ]  # fmt: skip
    for task in TEST_TASKS:
        assert len(generate(Task(task.length, task.pairs, 2), rng())) == 2


def test_tasks_that_cannot_be_are_refused() -> None:
    for length, pairs in ((64, 17), (63, 4), (64, 0)):
        with pytest.raises(ConfigError, match=f"got length {length} and {pairs} pairs"):
            Task(length, pairs, 1)
    with pytest.raises(ConfigError, match="16 pairs need a vocabulary of more than 32 tokens"):
        generate(Task(64, 16, 1), rng(), vocab_size=32)
