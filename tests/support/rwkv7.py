"""Small RWKV-7 models with random weights, and the ways to hand them out."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from nsm_core.config import EngineConfig
from nsm_core.loaded_model import LoadedModel
from nsm_core.rwkv7.config import Rwkv7Config
from nsm_core.rwkv7.files import Rwkv7Files
from nsm_core.rwkv7.loader import loaded_from
from nsm_core.rwkv7.model import Rwkv7Model
from nsm_core.rwkv7.tensors import tensor_shapes
from nsm_core.tokenizer import TOKENIZER_FILE, Tokenizer
from service.backends.local import LocalBackend


def small_config(**changes: int) -> Rwkv7Config:
    """A config that runs in a moment; head_size 16, so that a width of 64 has several heads."""
    sizes = {
        "vocab_size": 300, "width": 64, "num_layers": 2, "head_size": 16, "hidden": 128,
        "decay_rank": 16, "rate_rank": 16, "value_rank": 16, "gate_rank": 32,
    } | changes  # fmt: skip
    return Rwkv7Config(**sizes)


def random_tensors(config: Rwkv7Config, *, seed: int = 0) -> dict[str, Tensor]:
    """Tensors by canonical name with the spread of trained ones: decays from short to long, gains around 1, products of
    the size of their input.
    """
    generator = torch.Generator().manual_seed(seed)
    return {name: _random(name, shape, generator) for name, shape in tensor_shapes(config).items()}


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    part = name.rpartition("att.")[2] if ".att." in name else name.rpartition(".")[2]
    if part.startswith("x_"):
        return torch.rand(shape, generator=generator)
    if part == "w0":
        return torch.linspace(-6.0, 1.0, shape[-1]).reshape(shape) + 0.3 * noise
    if part in ("k_k", "k_a"):
        return 0.9 + 0.1 * noise
    if part in ("a0", "v0", "r_k"):
        return 0.3 * noise
    if name == "emb.weight":
        return noise
    if len(shape) == 1:
        return (1.0 if part.endswith("weight") else 0.0) + 0.1 * noise
    fan_in = shape[0] if part[-1] in "12" else shape[1]  # the small networks multiply from the right
    return noise * fan_in**-0.5


def random_rwkv7(tokenizer: Tokenizer, *, weight_format: str = "int8") -> LoadedModel[Rwkv7Model]:
    """As if it had been read from a file of this format."""
    config = small_config(vocab_size=tokenizer.vocab_size)
    files = Rwkv7Files(
        config=config,
        tensors=random_tensors(config),
        tokenizer=tokenizer,
        chat_template="plain-v1",
        weight_format=weight_format,
        fingerprint="random-rwkv7",
        name="random-rwkv7",
        created=1_700_000_000,
    )
    return loaded_from(files, torch.device("cpu"))


def rwkv7_backend(tokenizer: Tokenizer, **limits: int) -> LocalBackend:
    """A random model in this process, on int8 kernels where they are built."""
    config = EngineConfig(**{"max_slots": 4, "token_budget": 32, "queue_limit": 32, **limits})
    return LocalBackend(random_rwkv7(tokenizer), config)


def save_rwkv7(directory: Path, tokenizer: Tokenizer, **sizes: int) -> Path:
    """A directory with a file of official names and a tokenizer, as servers load it."""
    directory.mkdir()
    tensors = random_tensors(small_config(vocab_size=tokenizer.vocab_size, **sizes))
    save_file(tensors, directory / "rwkv7-random.safetensors")
    tokenizer.save(directory / TOKENIZER_FILE)
    return directory
