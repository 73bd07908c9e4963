"""Small random models, stored and not, and documents to read."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsm_core.model.nsm import NsmModel
from nsm_core.model.storage import WeightFormat, save_model
from nsm_core.tokenizer import Tokenizer
from nsm_lab.training.data_files import Document
from tests.nsm_lab.evaluation.models import random_model, small_config


@pytest.fixture
def model(tiny_tokenizer: Tokenizer) -> NsmModel:
    return random_model(small_config(tiny_tokenizer))


@pytest.fixture(params=["N", "NW", "A"])
def any_model(request: pytest.FixtureRequest, tiny_tokenizer: Tokenizer) -> NsmModel:
    """Slots, a hybrid, and attention alone."""
    return random_model(small_config(tiny_tokenizer, layer_pattern=request.param))


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
