"""The small models that tests serve: their shape, random weights, and the ways to hand them out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nsm_core.config import EngineConfig, ModelConfig
from nsm_core.model.loader import ARCHITECTURE, LoadedNsm
from nsm_core.model.nsm import NsmModel
from nsm_core.model.storage import WeightFormat, save_model
from nsm_core.tokenizer import Tokenizer
from service.backends.local import LocalBackend


def small_config(vocab_size: int, **changes: Any) -> ModelConfig:
    """Two layers of two heads, a millisecond a step."""
    fields: dict[str, Any] = {
        "vocab_size": vocab_size,
        "d_model": 32,
        "num_layers": 2,
        "num_heads": 2,
        "num_memory_slots": 8,
        "write_top_k": 2,
        "mlp_hidden": 64,
        "num_kv_heads": 1,
        "window": 24,
        "max_context": 64,
    }
    return ModelConfig(**{**fields, **changes})


def random_model(config: ModelConfig, *, seed: int = 0) -> NsmModel:
    """Random weights everywhere: a fresh model has zeros where its state would come to matter."""
    torch.manual_seed(seed)
    model = NsmModel(config).requires_grad_(False)
    for weight in model.parameters():
        if weight.dim() >= 2:
            weight.normal_(std=weight.shape[-1] ** -0.5)
    return model


class RandomModel(NsmModel):
    """A random model with an output head of its own: with tied embeddings one repeats a token for ever."""

    def __init__(self, vocab_size: int = 512, seed: int = 1, *, layer_pattern: str = "N", **changes: Any) -> None:
        super().__init__(small_config(vocab_size, layer_pattern=layer_pattern, **changes))
        self.requires_grad_(False)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() >= 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
        self.head = torch.randn(vocab_size, 32, generator=generator)

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.linear(hidden, self.head)


def save_small_model(directory: Path, tokenizer: Tokenizer, *, seed: int = 0, **changes: Any) -> Path:
    """A model directory, as servers load it."""
    model = random_model(small_config(tokenizer.vocab_size, **changes), seed=seed)
    save_model(model, tokenizer, directory, WeightFormat.FP32)
    return directory


def as_loaded(
    model: NsmModel, tokenizer: Tokenizer, *, fingerprint: str = "random", numerics: str = "cpu/fp32/test"
) -> LoadedNsm:
    """As if it had been read from a directory of this fingerprint."""
    return LoadedNsm(
        architecture=ARCHITECTURE,
        model=model,
        device=torch.device("cpu"),
        tokenizer=tokenizer,
        chat_template=model.config.chat_template,
        fingerprint=fingerprint,
        numerics=numerics,
        name="random",
        created=1_700_000_000,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        weight_format="fp32",
    )


def local_backend(
    tokenizer: Tokenizer, *, fingerprint: str = "random", pattern: str = "N", **limits: int
) -> LocalBackend:
    """A random model in this process. `pattern`: of its layers."""
    model = RandomModel(tokenizer.vocab_size, layer_pattern=pattern)
    config = EngineConfig(**{"max_slots": 4, "token_budget": 32, "queue_limit": 32, **limits})
    return LocalBackend(as_loaded(model, tokenizer, fingerprint=fingerprint), config)
