"""Rows that are read with fewer slots in training."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from nsm_core.config import ModelConfig
from nsm_core.errors import ConfigError
from nsm_core.model.storage import read_model
from nsm_core.tokenizer import Tokenizer
from nsm_lab.training.__main__ import parse
from nsm_lab.training.config import TrainConfig
from nsm_lab.training.loop import train
from nsm_lab.training.tiers import TierDraw
from tests.support.samples import BOOKS_DIR

MODEL = ModelConfig(
    vocab_size=512, d_model=32, num_layers=2, num_heads=2, num_memory_slots=8, write_top_k=8, router="sigmoid",
    mlp_hidden=64, state_tiers=(2, 4),
)  # fmt: skip


def draw(share: float = 0.25, *, rank: int = 0, rows: int = 4000) -> TierDraw:
    return TierDraw((2, 4, 8), share, rows=rows, seed=3, rank=rank)


def test_a_share_of_the_rows_has_each_size_as_likely() -> None:
    rows = draw().rows(0, is_carried=False)
    assert rows is not None
    counts = torch.bincount(rows, minlength=9) / len(rows)
    assert counts[[2, 4]].tolist() == pytest.approx([0.25 / 3] * 2, abs=0.02)
    assert float(counts[8]) == pytest.approx(0.75 + 0.25 / 3, abs=0.02)


def test_rows_keep_their_size_while_their_states_are_carried() -> None:
    tiers, again = draw(), draw()
    first = tiers.rows(0, is_carried=False)
    assert torch.equal(tiers.rows(1, is_carried=True), first)
    other = tiers.rows(2, is_carried=False)
    assert not torch.equal(other, first)
    assert torch.equal(again.rows(2, is_carried=False), other)
    assert not torch.equal(draw(rank=1).rows(2, is_carried=False), other)


def test_without_a_share_or_sizes_all_rows_have_all_slots() -> None:
    assert draw(0.0).rows(0, is_carried=False) is None
    assert TierDraw((8,), 0.5, rows=4, seed=0).rows(0, is_carried=False) is None


@pytest.mark.parametrize("allocation", [False, True])
def test_a_run_with_tiers_leaves_a_model_that_has_them(
    tiny_tokenizer: Tokenizer, tmp_path: Path, allocation: bool
) -> None:
    tiny_tokenizer.save(tmp_path / "given.json")
    model = dataclasses.replace(MODEL, allocation=allocation, min_slots=2, communication_interval=64)
    config = TrainConfig(
        data=BOOKS_DIR, out=tmp_path / "run", model=model, tokenizer=tmp_path / "given.json", device="cpu", steps=4,
        rows=4, seq_len=128, eval_every=4, eval_batches=1, save_every=4, weight_format="fp32", tier_share=1.0,
    )  # fmt: skip
    loaded, _, _ = read_model(train(config))
    assert loaded.config == model
    assert all(weight.isfinite().all() for weight in loaded.parameters())


def test_the_options_reach_the_model() -> None:
    config = parse(["--data", "d", "--out", "o", "--state-tiers", "16,32", "--allocation", "true", "--tier-share", "1"])
    assert config.model.state_tiers == (16, 32)
    assert config.model.allocation
    assert config.tier_share == 1


def test_no_tiers_are_wished_for_with_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(["--data", "d", "--out", "o", "--state-tiers", ""]).model.state_tiers == ()
    with pytest.raises(SystemExit):
        parse(["--data", "d", "--out", "o", "--state-tiers", "16,x"])
    assert "--state-tiers: must be whole numbers with commas between, as 16,32, got '16,x'" in capsys.readouterr().err


def test_tiers_of_a_model_without_them_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tier_share must be 0 for a model without state_tiers"):
        TrainConfig(data=tmp_path, out=tmp_path, model=dataclasses.replace(MODEL, state_tiers=()), tier_share=0.5)
