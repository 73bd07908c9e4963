"""RWKV-7 in the sizes of public models, with random weights: for speed only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from nsm_core.rwkv7.config import Rwkv7Config
from nsm_core.rwkv7.tensors import tensor_shapes

VOCABULARY = 65536
HEAD_SIZE = 64
# Width, layers, and the inner sizes behind decay, rate, value residual and gate, as the public files have them
SIZES = {
    "0.1B": (768, 12, 64, 64, 32, 128),
    "0.4B": (1024, 24, 64, 64, 32, 128),
    "1.5B": (2048, 24, 96, 96, 64, 256),
    "2.9B": (2560, 32, 96, 96, 64, 320),
}


def config_of(size: str) -> Rwkv7Config:
    width, num_layers, decay, rate, value, gate = SIZES[size]
    return Rwkv7Config(
        vocab_size=VOCABULARY,
        width=width,
        num_layers=num_layers,
        head_size=HEAD_SIZE,
        hidden=4 * width,
        decay_rank=decay,
        rate_rank=rate,
        value_rank=value,
        gate_rank=gate,
    )


class RandomTensors(Mapping[str, Tensor]):
    """bf16 tensors that are made when they are asked for, so that a packed copy needs no whole model beside it."""

    def __init__(self, config: Rwkv7Config) -> None:
        self._shapes = tensor_shapes(config)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._shapes[name])

    def __getitem__(self, name: str) -> Tensor:
        shape = self._shapes[name]
        generator = torch.Generator().manual_seed(len(name))
        return (torch.rand(shape, generator=generator) - 0.5).mul_(shape[-1] ** -0.5).bfloat16()

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)
