"""Parts of a model's work, seen from outside."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch

from nsm_core.model.block import Block
from nsm_lab.bench.parts import CALLS, PARTS, observed_parts
from tests.support.models import random_model, small_config


class Observer:
    def __init__(self) -> None:
        self.seen: list[str] = []
        self.depth = 0

    @contextlib.contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        self.seen.append(part)
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1


def runs(**fields: object) -> Iterator[Callable[[], object]]:
    """A prompt and a step of a model, with an exchange between slots in each."""
    config = small_config(64, layer_pattern="NCW", num_layers=3, communication_interval=64, **fields)
    model = random_model(config).eval()
    ids, state = torch.zeros(2, 70, dtype=torch.int64), model.initial_state(2)
    at_63 = {**state, "position": state["position"] + 63}
    yield lambda: model.logits(model(ids, state)[0])
    yield lambda: model.logits(model.step(ids[:, 0], at_63)[0])


def test_each_part_of_a_model_is_seen_as_often_as_it_works() -> None:
    for run in runs():
        observer = Observer()
        with observed_parts(observer):
            run()
        counts = Counter(observer.seen)
        assert set(counts) == set(PARTS)
        assert counts["router"] == counts["convolution"] == 2
        assert counts["feed_forward"] == counts["mixer"] == 3
        assert counts["communication"] == counts["attention"] == counts["head"] == counts["model"] == 1
        assert observer.depth == 0


@pytest.mark.parametrize("fields", [{"allocation": True}, {"projector": "direct"}, {"projector": "hybrid"}], ids=str)
def test_the_parts_of_every_kind_of_slots_are_seen(fields: dict[str, object]) -> None:
    for run in runs(**fields):
        observer = Observer()
        with observed_parts(observer):
            run()
        assert set(observer.seen) == set(PARTS)


def test_observation_ends_with_its_block_and_after_an_error() -> None:
    before = [vars(owner)[name] for owner, name, _ in CALLS]
    with pytest.raises(ZeroDivisionError), observed_parts(Observer()):
        assert vars(Block)["step"] not in before
        raise ZeroDivisionError
    assert [vars(owner)[name] for owner, name, _ in CALLS] == before
