"""Parts of a model's work: told to whoever listens, and to nobody else."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from nsm_core import spans
from nsm_core.spans import PARTS, listening, span, spanned
from tests.models import random_model, small_config


class Listener:
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


def test_a_model_names_its_parts_in_steps_and_in_prompts() -> None:
    model = random_model(small_config(64, layer_pattern="NCW", num_layers=3, communication_interval=64)).eval()
    ids, state = torch.zeros(2, 70, dtype=torch.int64), model.initial_state(2)
    at_63 = {**state, "position": state["position"] + 63}
    for run in (lambda: model.logits(model(ids, state)[0]), lambda: model.logits(model.step(ids[:, 0], at_63)[0])):
        listener = Listener()
        with listening(listener):
            run()
        counts = Counter(listener.seen)
        assert set(counts) == set(PARTS)
        assert counts["router"] == counts["convolution"] == 2
        assert counts["feed_forward"] == counts["mixer"] == 3
        assert counts["communication"] == counts["attention"] == counts["head"] == counts["model"] == 1
        assert listener.depth == 0


def test_nobody_listens_by_default_or_after_an_error() -> None:
    @spanned("head")
    def part() -> int:
        return 7

    listener = Listener()
    with pytest.raises(ZeroDivisionError), listening(listener), span("router"):
        raise ZeroDivisionError
    assert part() == 7
    assert listener.seen == ["router"]
    assert listener.depth == 0
    assert span("router") is span("head") is spans._NOTHING
