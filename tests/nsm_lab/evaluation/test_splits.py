from __future__ import annotations

import pytest
import torch

from nsm_core.model.nsm import NsmModel
from nsm_core.state.spec import State
from nsm_lab.evaluation.splits import measure_splits


def test_a_model_that_keeps_its_word_differs_by_rounding_only(any_model: NsmModel) -> None:
    ids = torch.randint(1, 400, (90,))
    result = measure_splits(any_model, ids, num_random=2, continuation_len=12)
    assert [row.split for row in result.splits] == ["random 1", "random 2", "token by token"]
    assert result.splits[0].num_pieces > 3
    assert result.splits[-1].num_pieces == result.num_tokens == 90
    for row in result.splits:
        assert row.logits < 1e-4 * max(1.0, result.max_logit)
        assert row.state < 1e-4 * max(1.0, result.max_state)
        assert row.is_same_continuation


def test_a_decode_path_that_differs_shows(model: NsmModel, monkeypatch: pytest.MonkeyPatch) -> None:
    step = model.step

    def shifted(ids: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        return step((ids + 1) % 400, state)

    monkeypatch.setattr(model, "step", shifted)
    last = measure_splits(model, torch.randint(1, 400, (40,)), num_random=0).splits[-1]
    assert last.logits > 0.1
    assert last.state > 0.1


def test_one_token_can_be_split_too(model: NsmModel) -> None:
    result = measure_splits(model, torch.tensor([5]), num_random=1, continuation_len=2)
    assert [row.num_pieces for row in result.splits] == [1, 1]
