"""Frozen, validated configuration of the model and of the engine."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from nsm_core.errors import ConfigError, reason_of
from nsm_core.layer_pattern import parse_layer_pattern

TOKENIZER_FILE = "tokenizer.json"  # here for commands that read no tokenizer
MAX_SIZE = 2**20  # of anything in a model; far above what runs, low enough to fail by name and not for want of memory
MAX_LAYERS = 1024
ROUTERS = ("softmax", "sigmoid")  # see nsm_core/model/router.py
GATES = ("gru", "lstm", "free")  # of gated slots: see nsm_core/model/gates.py
SIZES = (  # fields of ModelConfig that are a size
    "vocab_size",
    "d_model",
    "num_layers",
    "num_heads",
    "num_memory_slots",
    "write_top_k",
    "mlp_hidden",
    "timescale_groups",
    "num_kv_heads",
    "window",
    "max_context",
    "gate_chunk",
    "memory_rows",
    "memory_width",
    "memory_heads",
)
PROJECTORS = ("attention", "direct", "hybrid")  # how slots are read: see nsm_core/model/pulse.py


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def require_at_least(name: str, value: float, low: float) -> None:
    """Raises ConfigError that names the setting, its bound and the given value. Infinity and NaN are refused."""
    _require(low <= value < math.inf, f"{name} must be a number of at least {low}, got {value}")


def require_one_of(name: str, value: object, choices: Collection[str]) -> None:
    """Raises ConfigError that names the setting, its allowed values and the given one."""
    _require(value in choices, f"{name} must be one of {', '.join(choices)}, got {value!r}")


def canonical_json(fields: Mapping[str, Any]) -> str:
    """Sorted keys: equal fields give equal bytes."""
    return json.dumps(fields, indent=2, sort_keys=True) + "\n"


def read_fields(path: Path) -> dict[str, Any]:
    """The JSON object in the file. Raises ConfigError with the file's name."""
    try:
        fields = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read model config {path}: {reason_of(error)}") from error
    _require(isinstance(fields, dict), f"{path} must hold one JSON object")
    return dict(fields)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of a model; stored as `config.json` beside the weights. Defaults are part of that format: they stay.

    `d_model` is the width d, `num_heads` H, `num_memory_slots` M per head, `write_top_k` k; the head width K is d / H.
    With the `router` softmax, slots compete for a token; with sigmoid each decides for itself.
    `layer_pattern` has a letter for each layer and is repeated as often as needed: N is slot memory, C the same with
    an exchange between the slots every `communication_interval` tokens (each with `communication_top_k` others, 0: with
    all), G slots that the `gate` changes every `gate_chunk` tokens, L a linear recurrence, W attention to the last
    `window` tokens, A attention to the last `max_context`; `num_kv_heads` is that of W and A layers. Small letters are
    layers that another package registers: see nsm_core/model/registry.py. [NW] is one layer
    with both side by side, (WNL) one with three in a row. N and C layers read their slots by the `projector`.

    With `allocation` N and C layers have slots that are not in use: every `communication_interval` tokens those whose
    importance fell below `prune_share` of the mean, and that are older than `prune_age` intervals, are given up, down
    to `min_slots` a head, and under a pressure above `allocate_pressure` others are taken into use. A text starts with
    `start_slots` (0: all). `state_tiers`: smaller numbers of slots that a text may be read with.

    The last `upper_slots` of a head in a C layer are its second level: tokens read them and never write to them. M is
    a memory of `memory_rows` rows of `memory_width` numbers that `memory_heads` heads write to every `gate_chunk`
    tokens. K is slots that are written by key: a head has M of `slot_width` numbers (0: d / H).
    """

    layer_pattern: str = "N"
    vocab_size: int = 8192
    d_model: int = 512
    num_layers: int = 8
    num_heads: int = 8
    num_memory_slots: int = 64
    router: str = "softmax"
    write_top_k: int = 8
    mlp_hidden: int = 1408
    conv_taps: int = 4
    taper: float = 0.1
    timescale_groups: int = 1
    num_kv_heads: int = 8
    window: int = 256
    max_context: int = 2048
    rope_base: float = 10000.0
    norm_eps: float = 1e-6
    chat_template: str = "plain-v1"
    gate: str = "gru"
    gate_chunk: int = 32
    communication_interval: int = 256
    communication_top_k: int = 0
    projector: str = "attention"
    allocation: bool = False
    start_slots: int = 0
    min_slots: int = 4
    prune_share: float = 0.05
    prune_age: int = 4
    allocate_pressure: float = 0.1
    state_tiers: tuple[int, ...] = ()
    upper_slots: int = 0
    memory_rows: int = 128
    memory_width: int = 64
    memory_heads: int = 2
    slot_width: int = 0

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_choices()
        self._check_slots()
        self._check_intervals()
        self._check_allocation()
        self._check_tiers()
        self._check_levels()
        self._check_layers()

    def _check_sizes(self) -> None:
        for name in SIZES:
            value, high = getattr(self, name), MAX_LAYERS if name == "num_layers" else MAX_SIZE
            is_size = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= high
            _require(is_size, f"{name} must be a whole number in [1, {high}], got {value!r}")
        _require(
            0 <= self.slot_width <= MAX_SIZE,
            f"slot_width must be 0 (d_model / num_heads) to {MAX_SIZE}, got {self.slot_width}",
        )
        _require(self.conv_taps >= 2, f"conv_taps must be at least 2, got {self.conv_taps}")
        _require(
            self.d_model % self.num_heads == 0,
            f"d_model ({self.d_model}) must be a multiple of num_heads ({self.num_heads})",
        )

    def _check_choices(self) -> None:
        for name, choices in (("router", ROUTERS), ("gate", GATES), ("projector", PROJECTORS)):
            require_one_of(name, getattr(self, name), choices)

    def _check_slots(self) -> None:
        _require(
            self.write_top_k <= self.num_memory_slots,
            f"write_top_k ({self.write_top_k}) must be at most num_memory_slots ({self.num_memory_slots})",
        )
        _require(
            self.router == "softmax" or self.write_top_k == self.num_memory_slots,
            f"write_top_k must be num_memory_slots ({self.num_memory_slots}) with the sigmoid router, "
            f"which writes to all slots, got {self.write_top_k}",
        )
        _require(
            self.num_memory_slots % self.timescale_groups == 0,
            f"num_memory_slots ({self.num_memory_slots}) must be a multiple of timescale_groups "
            f"({self.timescale_groups})",
        )
        _require(
            0 <= self.communication_top_k <= self.num_memory_slots,
            f"communication_top_k must be 0 (all) to num_memory_slots ({self.num_memory_slots}), "
            f"got {self.communication_top_k}",
        )

    def _check_intervals(self) -> None:
        _require(self.taper > 0, f"taper must be above 0, got {self.taper}")
        _require(64 % self.gate_chunk == 0, f"gate_chunk must be 1, 2, 4, 8, 16, 32 or 64, got {self.gate_chunk}")
        _require(
            self.communication_interval >= 64 and self.communication_interval % 64 == 0,
            f"communication_interval must be a multiple of 64, got {self.communication_interval}",
        )

    def _check_allocation(self) -> None:
        slots = self.num_memory_slots
        _require(isinstance(self.allocation, bool), f"allocation must be true or false, got {self.allocation!r}")
        if not self.allocation:
            return
        _require(
            1 <= self.min_slots <= slots, f"min_slots must be 1 to num_memory_slots ({slots}), got {self.min_slots}"
        )
        _require(
            self.start_slots == 0 or self.min_slots <= self.start_slots <= slots,
            f"start_slots must be 0 (all) or min_slots ({self.min_slots}) to num_memory_slots ({slots}), "
            f"got {self.start_slots}",
        )
        _require(1 <= self.prune_age <= 64, f"prune_age must be 1 to 64 intervals, got {self.prune_age}")
        for name in ("prune_share", "allocate_pressure"):
            _require(0 <= getattr(self, name) <= 1, f"{name} must be in [0, 1], got {getattr(self, name)}")
        _require(
            self.communication_interval <= 4096,
            f"communication_interval must be at most 4096 with allocation, got {self.communication_interval}",
        )

    def _check_tiers(self) -> None:
        sizes = (0, *self.state_tiers, self.num_memory_slots)
        _require(
            all(isinstance(size, int) for size in sizes) and all(low < high for low, high in itertools.pairwise(sizes)),
            f"state_tiers must be rising numbers below num_memory_slots ({self.num_memory_slots}), "
            f"got {list(self.state_tiers)}",
        )
        if not self.state_tiers:
            return
        _require(
            not self.allocation or self.min_slots <= self.state_tiers[0],
            f"state_tiers must be at least min_slots ({self.min_slots}), got {list(self.state_tiers)}",
        )
        kinds = {kind for plan in parse_layer_pattern(self.layer_pattern) for kind in plan.kinds}
        _require(
            kinds <= set("NCLWA") and bool(kinds & {"N", "C"}),
            f"state_tiers are of N and C layers, beside which there may be L, W and A, got {self.layer_pattern!r}",
        )

    def _check_levels(self) -> None:
        if self.upper_slots == 0:
            return
        lower = self.num_memory_slots - self.upper_slots
        _require(
            self.upper_slots > 0 and lower > 0,
            f"upper_slots must be 0 to num_memory_slots - 1 ({self.num_memory_slots - 1}), got {self.upper_slots}",
        )
        _require("C" in self.layer_pattern, f"upper_slots are of C layers, got {self.layer_pattern!r}")
        _require(
            not self.allocation and not self.state_tiers, "upper_slots cannot be had with allocation or state_tiers"
        )
        _require(
            self.router == "sigmoid" or self.write_top_k <= lower,
            f"write_top_k ({self.write_top_k}) must be at most num_memory_slots - upper_slots ({lower})",
        )
        _require(
            self.communication_top_k < lower,
            f"communication_top_k ({self.communication_top_k}) must be below num_memory_slots - upper_slots ({lower})",
        )
        _require(
            lower % self.timescale_groups == 0,
            f"num_memory_slots - upper_slots ({lower}) must be a multiple of timescale_groups "
            f"({self.timescale_groups})",
        )

    def _check_layers(self) -> None:
        kinds = {kind for plan in parse_layer_pattern(self.layer_pattern) for kind in plan.kinds}
        if not kinds & {"W", "A"}:
            return
        _require(
            self.num_heads % self.num_kv_heads == 0,
            f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})",
        )
        self.require_rotary()

    def require_rotary(self) -> None:
        """What a layer with rotary positions needs. Raises ConfigError."""
        _require(self.head_dim % 2 == 0, f"d_model / num_heads must be even for attention, got {self.head_dim}")
        _require(self.rope_base > 1, f"rope_base must be above 1, got {self.rope_base}")

    @property
    def head_dim(self) -> int:
        """K, the width of one head."""
        return self.d_model // self.num_heads

    def to_json(self) -> str:
        """The text of a `config.json`: all fields, in `canonical_json`."""
        return canonical_json(dataclasses.asdict(self))

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> ModelConfig:
        """Refuses unknown names: a misspelt field must not run with its default."""
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(fields) - known)
        _require(not unknown, f"unknown model config field {', '.join(unknown)}; known: {', '.join(sorted(known))}")
        if isinstance(fields.get("state_tiers"), list):  # as JSON has it
            fields = {**fields, "state_tiers": tuple(fields["state_tiers"])}
        return cls(**fields)

    @classmethod
    def load(cls, path: Path) -> ModelConfig:
        """Reads `config.json`; a field that it lacks has its default. Raises ConfigError with the file's name."""
        return cls.from_dict(read_fields(path))


# How an engine drafts tokens, see EngineConfig
SPECULATIONS = ("off", "lookup")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Limits of one engine.

    `max_slots` rows of state, i.e. requests that run at once; `token_budget` most tokens one step may process, at
    least `max_slots`, and all that runs waits for a step; `queue_limit` most requests that may wait; `speculation`:
    where the executor allows it, `lookup` drafts tokens of greedy requests from their own text (the tokens stay the
    same), `off` none; `held_state_bytes`: of states that stay with the engine between requests;
    `prompt_tokens_beside`: most tokens of prompts in a step in which others decode, None for the whole budget.
    """

    max_slots: int = 16
    token_budget: int = 256
    queue_limit: int = 256
    speculation: str = "lookup"
    held_state_bytes: int = 256 * 1024 * 1024
    prompt_tokens_beside: int | None = None

    def __post_init__(self) -> None:
        require_one_of("speculation", self.speculation, SPECULATIONS)
        for name, low in (("max_slots", 1), ("token_budget", 1), ("queue_limit", 0)):
            require_at_least(name, getattr(self, name), low)
        _require(
            self.token_budget >= self.max_slots,
            f"token_budget ({self.token_budget}) must be at least max_slots ({self.max_slots}): "
            "every row decodes one token a step",
        )

    @property
    def max_requests(self) -> int:
        """Requests that the engine can hold, running and waiting."""
        return self.max_slots + self.queue_limit


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Limits of an engine as they are asked for: `EngineConfig`, before the device is known.

    `max_slots`, `token_budget`: None takes the device's default.
    """

    max_slots: int | None = None
    token_budget: int | None = None
    queue_limit: int = 256
    speculation: str = "lookup"

    def __post_init__(self) -> None:
        self.resolve(max_slots=1, token_budget=1)  # refuses what fits no device

    def resolve(self, *, max_slots: int, token_budget: int) -> EngineConfig:
        """With the defaults of a device. One limit that is given moves the default of the other. Raises ConfigError."""
        slots = self.max_slots if self.max_slots is not None else min(max_slots, self.token_budget or max_slots)
        budget = self.token_budget if self.token_budget is not None else max(token_budget, slots)
        return EngineConfig(
            max_slots=slots, token_budget=budget, queue_limit=self.queue_limit, speculation=self.speculation
        )
