"""Everything a recall run depends on, in one frozen value."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from nsm_core.config import ModelConfig
from nsm_core.errors import ConfigError
from nsm_lab.evaluation.mqar.data import TEST_TASKS, TRAIN_TASKS, VOCAB_SIZE, Task

# Two layers of 64 slots: 2 x 2 x 64 x 256 = 65,536 numbers of slot memory.
DEFAULT_MODEL = ModelConfig(
    vocab_size=VOCAB_SIZE,
    d_model=256,
    num_layers=2,
    num_heads=4,
    num_memory_slots=64,
    write_top_k=8,
    mlp_hidden=1,
    num_kv_heads=4,
    max_context=1024,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MqarConfig:
    """One run. Like Zoology's models, the default has no feed-forward layers (`mlp` False)."""

    model: ModelConfig = DEFAULT_MODEL
    mlp: bool = False
    train_tasks: tuple[Task, ...] = TRAIN_TASKS
    test_tasks: tuple[Task, ...] = TEST_TASKS
    batch: int = 256  # sequences
    epochs: int = 16
    lr: float = 3e-3
    weight_decay: float = 0.1  # projections only
    warmup: float = 0.02  # share of the run
    clip: float = 1.0
    target: float = 0.99  # stop when the mean over the test set reaches it
    time_limit_s: float | None = None  # the learning rate falls with whichever ends first, steps or time
    seed: int = 0
    device: str = "auto"
    precision: str = "auto"  # bf16 autocast on a GPU, fp32 on a CPU
    compile: bool = False
    output: Path | None = None  # writes <output>.json and <output>.md

    def __post_init__(self) -> None:
        self._require(self.batch >= 1, "batch", "at least 1")
        self._require(self.epochs >= 1, "epochs", "at least 1")
        self._require(self.lr > 0, "lr", "above 0")
        self._require(self.clip > 0, "clip", "above 0")
        self._require(self.weight_decay >= 0, "weight_decay", "at least 0")
        self._require(0.0 <= self.warmup <= 1.0, "warmup", "in [0, 1]")
        self._require(self.time_limit_s is None or self.time_limit_s > 0, "time_limit_s", "above 0")
        self._require(self.precision in ("auto", "bf16", "fp32"), "precision", "auto, bf16 or fp32")

    def _require(self, condition: bool, name: str, allowed: str) -> None:
        if not condition:
            raise ConfigError(f"{name} must be {allowed}, got {getattr(self, name)!r}")
