from __future__ import annotations

import pytest
import torch

from nsm_core.tokenizer import Tokenizer
from nsm_core.tuning.config import TuneConfig, split_examples
from nsm_core.tuning.loss import mean_loss
from nsm_core.tuning.start import after_start_token
from nsm_lab.training.lora import Lora, train_lora
from tests.support.tuning import FAMILIES, examples_of, pairs, tunable

CONFIG = TuneConfig(num_epochs=2, batch_size=4, rate=0.01, eval_every=2)


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_change_nothing_before_training(family: str, tiny_tokenizer: Tokenizer) -> None:
    examples = examples_of(pairs(4), tiny_tokenizer)
    plain, adapted = tunable(family, tiny_tokenizer), tunable(family, tiny_tokenizer)
    lora = Lora(adapted, rank=2, seed=0)
    assert lora.num_parameters > 0
    losses = [
        mean_loss(one.model, after_start_token(one), examples, device=one.device, max_tokens=256)
        for one in (plain, adapted)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_training_lowers_the_held_out_loss_and_leaves_the_best_adapters(family: str, tiny_tokenizer: Tokenizer) -> None:
    loaded = tunable(family, tiny_tokenizer)
    train, held_out = split_examples(examples_of(pairs(12), tiny_tokenizer), seed=0)
    before = mean_loss(loaded.model, after_start_token(loaded), held_out, device=loaded.device, max_tokens=256)
    lora, best = train_lora(loaded, CONFIG, train, held_out, rank=2)
    assert best < before
    with torch.no_grad():
        after = mean_loss(loaded.model, after_start_token(loaded), held_out, device=loaded.device, max_tokens=256)
    assert after == pytest.approx(best, rel=1e-5)
    assert all(bool(term.up.any()) for term in lora.terms)
