from __future__ import annotations

import pytest
import torch

from nsm_core.errors import NumericalError
from nsm_core.model.nsm import NsmModel
from nsm_core.tokenizer import Tokenizer
from nsm_lab.evaluation.samples import write_samples


def test_each_prompt_is_continued_greedily_and_drawn(model: NsmModel, tiny_tokenizer: Tokenizer) -> None:
    samples = write_samples(model.eval(), tiny_tokenizer, ["The sea", ""], max_tokens=6, seed=3)
    assert [(s.prompt, s.temperature, s.seed) for s in samples] == [
        ("The sea", 0.0, 3),
        ("The sea", 0.8, 3),
        ("", 0.0, 3),
        ("", 0.8, 3),
    ]


def test_the_greedy_sample_is_the_models_own_argmax(model: NsmModel, tiny_tokenizer: Tokenizer) -> None:
    (greedy, _) = write_samples(model.eval(), tiny_tokenizer, ["The sea"], max_tokens=6, seed=0)
    ids = [0, *tiny_tokenizer.encode("The sea")]
    prompt_len = len(ids)
    for _ in range(6):
        with torch.no_grad():
            hidden, _ = model(torch.tensor([ids]), model.initial_state(1))
            ids.append(int(model.logits(hidden[0, -1]).argmax()))
    assert 0 not in ids[prompt_len:]  # so that the comparison covers all six tokens
    assert greedy.text == tiny_tokenizer.decode(ids[prompt_len:])


def test_a_seed_repeats_its_sample_and_another_differs(model: NsmModel, tiny_tokenizer: Tokenizer) -> None:
    texts = [
        write_samples(model.eval(), tiny_tokenizer, ["The"], max_tokens=12, seed=seed)[1].text for seed in (5, 5, 6)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_end_of_text_ends_a_sample(model: NsmModel, tiny_tokenizer: Tokenizer) -> None:
    torch.nn.init.zeros_(model.embedding.weight)  # equal logits: greedy takes the lowest id, which is end_of_text
    assert write_samples(model.eval(), tiny_tokenizer, ["The sea"], max_tokens=9, seed=0)[0].text == ""


def test_a_broken_model_is_an_error(model: NsmModel, tiny_tokenizer: Tokenizer) -> None:
    torch.nn.init.constant_(model.embedding.weight, float("nan"))
    with pytest.raises(NumericalError):
        write_samples(model.eval(), tiny_tokenizer, ["The sea"], max_tokens=9, seed=0)
