"""Small random models that fit the tiny tokenizer, and documents to read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nsm_core.config import ModelConfig
from nsm_core.model.nsm import NsmModel
from nsm_core.model.storage import WeightFormat, save_model
from nsm_core.tokenizer import Tokenizer
from nsm_core.training.data_files import Document


@pytest.fixture
def model(tiny_tokenizer: Tokenizer) -> NsmModel:
    """Random weights, those that start at zero included: its state matters to its logits."""
    torch.manual_seed(0)
    model = NsmModel(
        ModelConfig(
            vocab_size=tiny_tokenizer.vocab_size,
            d_model=32,
            num_layers=2,
            num_heads=2,
            num_memory_slots=8,
            write_top_k=2,
            mlp_hidden=64,
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.2)
    return model


@pytest.fixture
def checkpoint(model: NsmModel, tiny_tokenizer: Tokenizer, tmp_path: Path) -> Path:
    directory = tmp_path / "random-model"
    save_model(model, tiny_tokenizer, directory, WeightFormat.FP32)
    return directory


@pytest.fixture
def documents() -> list[Document]:
    """Ragged on purpose: longer and shorter than a segment, two bytes a character, nothing at all."""
    texts = [
        "The sea was calm. " * 30,
        "A short one.",
        "Émile — naïve façade\n\n" * 12,
        "",
        "It was the best of times, " * 9,
    ]
    return [Document(id=f"d{i}", text=text) for i, text in enumerate(texts)]
