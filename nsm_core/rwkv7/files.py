"""What a reader of model files hands over: an RWKV-7 model whose tensors are still on disk."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import Tensor

from nsm_core.rwkv7.config import Rwkv7Config
from nsm_core.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rwkv7Files:
    """`tensors`: by canonical name (`tensor_shapes`); each look-up reads that tensor from the file, in fp32, fp16 or
    bf16, and keeps nothing.

    `weight_format`: of the large matrices in the file, as `fp32`, `fp16`, `bf16`, `int8` or `int4`. `fingerprint`:
    hash over config, weights and tokenizer. `created`: unix seconds of the weights' file.
    """

    config: Rwkv7Config
    tensors: Mapping[str, Tensor]
    tokenizer: Tokenizer
    chat_template: str
    weight_format: str
    fingerprint: str
    name: str
    created: int
