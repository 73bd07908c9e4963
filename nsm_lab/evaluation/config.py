"""The configuration of an evaluation, one frozen value."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal, get_args

from nsm_core.errors import ConfigError
from nsm_core.execution.names import EXECUTOR_NAMES, ExecutorName
from nsm_lab.evaluation.history import fresh_starts, keys, repeats
from nsm_lab.evaluation.losses import DEFAULT_BUCKETS, check_edges
from nsm_lab.evaluation.passkey import DEFAULT_DEPTHS, DEFAULT_LENGTHS
from nsm_lab.training.data_files import SPLITS, Split

Part = Literal["loss", "history", "passkey", "stored_states", "split", "slots", "samples"]
PARTS: tuple[Part, ...] = get_args(Part)
COUNTS = (
    "max_documents",
    "max_tokens_per_document",
    "segment_len",
    "batch_documents",
    "sample_tokens",
    "passkey_examples",
    "stored_state_prefix",
    "stored_state_count",
    "split_tokens",
    "history_passages",
    "history_prompts",
)
# Lengths and distances in tokens; an empty one leaves its measurement out.
HISTORY_LISTS = ("history_starts", "history_spans", "history_repeats", "history_contexts", "history_distances")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """One evaluation. The defaults read every document of the validation split to its end."""

    data: Path
    model: Path | None = None  # None: the bundled model
    suite: tuple[str, ...] = ("loss", "split", "slots", "samples")
    split: Split = "val"
    max_documents: int | None = None
    max_tokens_per_document: int | None = None
    segment_len: int = 512  # tokens a forward call: speed and memory only
    batch_documents: int = 8
    buckets: tuple[int, ...] = DEFAULT_BUCKETS
    device: str = "auto"
    precision: str = "auto"  # bf16 autocast on a GPU, fp32 on a CPU; of the eager executor
    executor: ExecutorName = "eager"
    prompts: tuple[str, ...] = ()  # a greedy and a drawn continuation of each
    sample_tokens: int = 100
    passkey_lengths: tuple[int, ...] = DEFAULT_LENGTHS
    passkey_depths: tuple[float, ...] = DEFAULT_DEPTHS
    passkey_examples: int = 10  # for each length and depth
    stored_state_prefix: int = 1024  # tokens before each time a state is stored
    stored_state_count: int = 4  # most times in a document
    split_tokens: int = 256
    history_starts: tuple[int, ...] = fresh_starts.DEFAULT_STARTS
    history_spans: tuple[int, ...] = fresh_starts.DEFAULT_SPANS
    history_repeats: tuple[int, ...] = repeats.DEFAULT_DISTANCES
    history_passages: int = 4  # of a document
    history_contexts: tuple[int, ...] = keys.DEFAULT_CONTEXTS
    history_distances: tuple[int, ...] = keys.DEFAULT_DISTANCES
    history_prompts: int = 1  # of a document, for each context
    seed: int = 0
    output: Path | None = None  # writes <output>.json and <output>.md

    def __post_init__(self) -> None:
        for name in COUNTS:
            value = getattr(self, name)
            self._require(value is None or value >= 1, name, "at least 1")
        for name in HISTORY_LISTS:
            self._require(all(value >= 2 for value in getattr(self, name)), name, "numbers of at least 2 tokens")
        check_edges(self.buckets)
        self._require(self.split in SPLITS, "split", ", ".join(SPLITS[:-1]) + f" or {SPLITS[-1]}")
        self._require(self.precision in ("auto", "bf16", "fp32"), "precision", "auto, bf16 or fp32")
        self._require(bool(self.suite) and set(self.suite) <= set(PARTS), "suite", "one or more of " + ", ".join(PARTS))
        self._require(self.executor in EXECUTOR_NAMES, "executor", "one of " + ", ".join(EXECUTOR_NAMES))
        is_share = bool(self.passkey_depths) and all(0.0 <= depth <= 1.0 for depth in self.passkey_depths)
        self._require(is_share, "passkey_depths", "in [0, 1]")
        are_lengths = bool(self.passkey_lengths) and min(self.passkey_lengths) >= 1
        self._require(are_lengths, "passkey_lengths", "one or more numbers of at least 1 token")

    def _require(self, condition: bool, name: str, allowed: str) -> None:
        if not condition:
            raise ConfigError(f"{name} must be {allowed}, got {getattr(self, name)!r}")
