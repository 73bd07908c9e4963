"""A training run of RWKV-7, as one value."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from nsm_core.errors import ConfigError
from nsm_lab.baselines.rwkv7_scan.operator import CHUNK_TOKENS
from nsm_lab.training.rwkv7.model import HEAD_SIZE


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rwkv7TrainConfig:
    """Rows begin anywhere in the text, with an empty state."""

    data: Path
    tokenizer: Path
    out: Path  # directory for the model
    cache: Path | None = None  # directory for token ids; None: in `out`
    width: int = 384
    layers: int = 8
    steps: int = 1000
    rows: int = 32
    seq_len: int = 2048  # tokens
    muon_lr: float = 0.015  # matrices of the layers
    adam_lr: float = 3e-3  # embedding and head; the rest learns at half of it
    warmup: float = 0.03  # share of the steps
    decay: float = 0.7  # share of the steps in which the rate falls to zero
    clip: float = 1.0
    seed: int = 0
    log_every: int = 50  # steps

    def __post_init__(self) -> None:
        for name in ("layers", "steps", "rows", "log_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name, unit in (("width", HEAD_SIZE), ("seq_len", CHUNK_TOKENS)):
            if getattr(self, name) < unit or getattr(self, name) % unit:
                raise ConfigError(f"{name} must be a multiple of {unit}, got {getattr(self, name)}")
        for name in ("warmup", "decay"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"{name} must be in [0, 1], got {getattr(self, name)}")
        for name in ("muon_lr", "adam_lr", "clip"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")
