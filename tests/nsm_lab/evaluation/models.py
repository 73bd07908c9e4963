"""Small random models that fit the tiny tokenizer."""

from __future__ import annotations

from typing import Any

import torch

from nsm_core.config import ModelConfig
from nsm_core.model.nsm import NsmModel
from nsm_core.tokenizer import Tokenizer
from tests.support import models


def small_config(tokenizer: Tokenizer, **changes: Any) -> ModelConfig:
    return models.small_config(tokenizer.vocab_size, **{"num_kv_heads": 2, "window": 16, **changes})


def random_model(config: ModelConfig) -> NsmModel:
    """Random weights, those that start at zero included: its state matters to its logits."""
    torch.manual_seed(0)
    model = NsmModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.2)
    return model
