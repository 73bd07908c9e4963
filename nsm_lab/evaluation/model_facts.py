"""What a report says of a model's size: its layers and the bytes of its state after some tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

from nsm_core.config import ModelConfig
from nsm_core.rwkv7.config import Rwkv7Config
from nsm_core.state.spec import StateSpec

STATE_POSITIONS = (1024, 8192, 32768)  # tokens
# Key-value caches [heads, 2, window, width]: the only tensors of a state that fill up with the text.
_CACHE_SUFFIX = ".kv"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """`config` as stored beside the weights. `state_bytes`: (tokens read, bytes in use), fp32."""

    config: dict[str, Any]
    state_bytes: tuple[tuple[int, int], ...]  # (tokens, bytes)

    def state_summary(self) -> str:
        """For a heading, e.g. `a state of 2.1 MB`."""
        sizes = [num_bytes for _, num_bytes in self.state_bytes]
        if len(set(sizes)) == 1:
            return f"a state of {megabytes(sizes[0])}"
        parts = (f"{megabytes(num_bytes)} after {tokens:,}" for tokens, num_bytes in self.state_bytes)
        return f"a state of {', '.join(parts)} tokens"


def model_facts(config: ModelConfig | Rwkv7Config, spec: StateSpec) -> ModelFacts:
    return ModelFacts(
        config=dataclasses.asdict(config),
        state_bytes=tuple((tokens, state_bytes_after(spec, tokens)) for tokens in STATE_POSITIONS),
    )


def state_bytes_after(spec: StateSpec, num_tokens: int) -> int:
    """Bytes of a state that hold something after `num_tokens` tokens: of a cache, the places written so far."""
    total = 0
    for tensor in spec.tensors:
        if tensor.name.endswith(_CACHE_SUFFIX):
            window = tensor.shape[2]
            total += tensor.num_bytes // window * min(num_tokens, window)
        else:
            total += tensor.num_bytes
    return total


def megabytes(num_bytes: int) -> str:
    """Decimal, three digits, e.g. `2.1 MB`."""
    return f"{num_bytes / 1e6:.3g} MB"
