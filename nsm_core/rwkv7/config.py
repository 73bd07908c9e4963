"""The sizes of an RWKV-7 model. No torch here."""

from __future__ import annotations

import dataclasses

from nsm_core.config import MAX_LAYERS, MAX_SIZE, require_at_least
from nsm_core.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rwkv7Config:
    """All that the forward pass needs to know beside the weights; every size follows from the shapes of the tensors.

    `width` is D, `head_size` the keys and the values of one head. The ranks are the inner sizes of the small networks
    behind the decay (`w1`), the in-context learning rate (`a1`), the value residual (`v1`) and the gate (`g1`);
    `value_rank` is 0 in a model of one layer, which has no value residual. `hidden` is the inner size of the channel
    mix. Raises ConfigError for sizes that no model can have.
    """

    vocab_size: int
    width: int
    num_layers: int
    head_size: int
    decay_rank: int
    rate_rank: int
    value_rank: int
    gate_rank: int
    hidden: int
    norm_eps: float = 1e-5
    head_norm_eps: float = 64e-5

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "width",
            "num_layers",
            "head_size",
            "decay_rank",
            "rate_rank",
            "gate_rank",
            "hidden",
        ):
            _require_size(name, getattr(self, name), 1, MAX_LAYERS if name == "num_layers" else MAX_SIZE)
        _require_size("value_rank", self.value_rank, 1 if self.num_layers > 1 else 0, MAX_SIZE)
        if self.width % self.head_size != 0:
            raise ConfigError(f"width ({self.width}) must be a multiple of head_size ({self.head_size})")
        for name in ("norm_eps", "head_norm_eps"):
            require_at_least(name, getattr(self, name), 0.0)

    @property
    def num_heads(self) -> int:
        return self.width // self.head_size


def _require_size(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"{name} must be a whole number in [{low}, {high}], got {value!r}")
