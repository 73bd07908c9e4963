"""What may be asked for as the executor of a model. No torch here: settings name it."""

from __future__ import annotations

from typing import Literal, get_args

# auto: native on a CPU where the model's file is int8, cuda on a GPU, eager elsewhere. cuda: with bf16 matrices
Wish = Literal["auto", "eager", "native", "cuda", "cuda-fp16", "cuda-fp32"]
WISHES: tuple[Wish, ...] = get_args(Wish)
