"""The configuration of a training run, one frozen value."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from nsm_core.config import ModelConfig
from nsm_core.errors import ConfigError
from nsm_lab.training.recall import FAR_SHARE, PASSAGE_SHARE


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """One run. `rows` are sequences a process reads at once; `carry` is the share of steps whose rows continue from
    the state of the step before (gradients stop there), which teaches the model to use texts longer than `seq_len`.
    """

    data: Path
    out: Path
    model: ModelConfig
    tokenizer: Path | None = None  # None: learn one from the training split
    cache: Path | None = None  # directory for token ids, shared between runs; None: one of this run's own
    steps: int = 1000
    seq_len: int = 1024  # tokens
    rows: int = 32
    accumulate: int = 1  # each step's rows are split into this many parts
    muon_lr: float = 0.02  # matrices inside the blocks
    adam_lr: float = 2e-3  # embeddings, gates, norms, learned states
    weight_decay: float = 0.1  # matrices only
    warmup: float = 0.02  # share of the steps
    schedule: str = "linear"  # linear: constant, then to zero over `decay`; cosine: over all steps
    decay: float = 0.4  # share of the steps
    clip: float = 1.0
    balance_loss: float = 0.0  # weight of the penalty on uneven use of slots, a layer; 0: not computed
    z_loss: float = 0.0  # weight of the penalty on large router logits, a layer; 0: not computed
    key_spread: float = 0.0  # weight of the penalty on written routes that resemble each other, a keyed layer
    dropout: float = 0.0
    carry: float = 0.5
    recall: float = 0.0  # share of the training tokens that repeat or ask for what the same document said before
    recall_end: float | None = None  # the share at the end of the run, reached in a straight line; None: the same
    recall_loss: str = "answers"  # answers: what a question asks for, and passages; all: every word that is inserted
    first_answer: int = 3  # weight in the loss of the first token of an answer; its other tokens weigh 3
    silent_tokens: int = 8  # of a passage that returns, the first, without weight in the loss
    passage_weight: int = 1  # of its later tokens, in the loss
    passages: float = PASSAGE_SHARE  # of what is inserted for recall, by number; the others are facts with questions
    far_passages: float = FAR_SHARE  # of them, those that return after thousands of tokens
    whole_rows: bool = False  # every row is text of one document; for full attention, which then needs no mask
    tier_share: float = 0.0  # of the rows: read with one of the model's `state_tiers`, or all slots, each as likely
    start: Path | None = None  # model directory whose weights the run begins with; None: new ones
    loops: float = 0.0  # with recall: share of the training tokens in loops that the text leaves again
    loop_penalty: float = 0.0  # weight of the penalty on tokens of such loops that are likelier than in the first turn
    keep_strengths: tuple[float, ...] = ()  # of heads that are made to keep, in each keyed layer: the most they write
    keep_context: float = 1.0  # most that a kept head's strength may depend on the token: the length of its row
    keep_budget: int = 0  # steps after which kept heads are looked at, that they write no more on average; 0: never
    ema: float = 0.0  # decay of the averaged weights, which are then validated and saved; 0: none
    seed: int = 0
    device: str = "auto"
    precision: str = "auto"  # bf16 autocast on a GPU, fp32 on a CPU
    compile: bool = True
    checkpoint_blocks: bool = False  # recompute activations: less memory, about a third slower
    eval_every: int = 250  # steps
    eval_batches: int = 8
    save_every: int = 500  # steps
    weight_format: str = "bf16"
    resume: bool = False

    def __post_init__(self) -> None:
        for name in ("steps", "seq_len", "rows", "accumulate", "eval_every", "eval_batches", "save_every"):
            self._require(getattr(self, name) >= 1, name, "at least 1")
        for name in ("warmup", "decay", "dropout", "carry", "tier_share", "passages", "far_passages"):
            self._require(0.0 <= getattr(self, name) <= 1.0, name, "in [0, 1]")
        for name in ("ema", "recall"):
            self._require(0.0 <= getattr(self, name) < 1.0, name, "in [0, 1)")
        if self.recall_end is not None:
            self._require(self.recall > 0, "recall_end", "left out without recall")
            self._require(0.0 < self.recall_end < 1.0, "recall_end", "in (0, 1)")
        for name in ("weight_decay", "balance_loss", "z_loss", "key_spread", "loop_penalty"):
            self._require(0.0 <= getattr(self, name) < math.inf, name, "a number of at least 0")
        for name in ("muon_lr", "adam_lr"):
            self._require(0.0 < getattr(self, name) < math.inf, name, "a finite number above 0")
        self._require(self.clip > 0.0, "clip", "above 0")
        self._require(self.recall_loss in ("answers", "all"), "recall_loss", "answers or all")
        for name in ("first_answer", "passage_weight"):
            self._require(1 <= getattr(self, name) <= 255, name, "in [1, 255]")
        self._require(0.0 <= self.keep_context < math.inf, "keep_context", "a number of at least 0")
        self._require(self.keep_budget >= 0, "keep_budget", "a number of steps, or 0")
        self._require(self.silent_tokens >= 1, "silent_tokens", "at least 1")
        self._require(self.rows % self.accumulate == 0, "rows", f"a multiple of accumulate ({self.accumulate})")
        self._require(0.0 <= self.loops < 0.5, "loops", "in [0, 0.5)")
        self._require(self.loops == 0 or self.recall > 0, "loops", "0 without recall")
        most = self.model.num_heads if "K" in self.model.layer_pattern else 0
        self._require(len(self.keep_strengths) <= most, "keep_strengths", f"at most {most} numbers")
        self._require(all(0.0 < value < 1.0 for value in self.keep_strengths), "keep_strengths", "numbers in (0, 1)")
        sees_all = set(self.model.layer_pattern) == {"A"} and self.carry == 0
        self._require(sees_all or not self.whole_rows, "whole_rows", "left out but for layers A with --carry 0")
        has_tiers = self.tier_share == 0 or bool(self.model.state_tiers)
        self._require(has_tiers, "tier_share", "0 for a model without state_tiers")
        self._require(self.schedule in ("linear", "cosine"), "schedule", "linear or cosine")
        self._require(self.precision in ("auto", "bf16", "fp32"), "precision", "auto, bf16 or fp32")
        formats = ("fp32", "bf16", "int8", "int4")
        self._require(self.weight_format in formats, "weight_format", "fp32, bf16, int8 or int4")

    def _require(self, condition: bool, name: str, allowed: str) -> None:
        if not condition:
            raise ConfigError(f"{name} must be {allowed}, got {getattr(self, name)!r}")
