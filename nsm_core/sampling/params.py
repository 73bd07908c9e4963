"""What a request wishes of the sampler. Plain values: no torch here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType

from nsm_core.errors import InvalidRequest

MAX_STOP_STRINGS = 16
MAX_TOP_LOGPROBS = 20
SEED_BITS = 64


def _check(condition: bool, param: str, wish: str, given: object) -> None:
    if not condition:
        raise InvalidRequest(f"{param} must be {wish}, got {given!r}", param=param)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Frozen wishes of one request; every value is checked here, once.

    `seed` is always set by whoever builds the value (drawn once when the client gave none), so that a stored turn can
    be repeated. A draw depends on (seed, choice_index, absolute position) only.
    """

    max_tokens: int = 16
    temperature: float = 1.0                      # 0 means greedy
    top_p: float = 1.0                            # in (0, 1]
    top_k: int = 0                                # 0 means all
    min_p: float = 0.0                            # in [0, 1]
    repetition_penalty: float = 1.0               # above 0; 1 means none
    presence_penalty: float = 0.0                 # in [-2, 2]
    frequency_penalty: float = 0.0                # in [-2, 2]
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=lambda: MappingProxyType({}))
    seed: int = 0
    choice_index: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None                   # None: none; n: the chosen token and the n most likely

    def __post_init__(self) -> None:
        _check(self.max_tokens >= 1, "max_tokens", "at least 1", self.max_tokens)
        for name, low, high in (("temperature", 0.0, 2.0), ("min_p", 0.0, 1.0),
                                ("presence_penalty", -2.0, 2.0), ("frequency_penalty", -2.0, 2.0)):
            value = getattr(self, name)
            _check(math.isfinite(value) and low <= value <= high, name, f"in [{low:g}, {high:g}]", value)
        _check(math.isfinite(self.top_p) and 0.0 < self.top_p <= 1.0, "top_p", "in (0, 1]", self.top_p)
        _check(self.top_k >= 0, "top_k", "at least 0 (0 means all tokens)", self.top_k)
        _check(math.isfinite(self.repetition_penalty) and 0.0 < self.repetition_penalty <= 10.0,
               "repetition_penalty", "in (0, 10]", self.repetition_penalty)
        _check(0 <= self.seed < 2**SEED_BITS, "seed", f"in [0, 2**{SEED_BITS})", self.seed)
        _check(self.choice_index >= 0, "choice_index", "at least 0", self.choice_index)
        _check(len(self.stop) <= MAX_STOP_STRINGS, "stop", f"at most {MAX_STOP_STRINGS} strings", len(self.stop))
        _check(all(self.stop), "stop", "made of non-empty strings", list(self.stop))
        _check(self.logprobs is None or 0 <= self.logprobs <= MAX_TOP_LOGPROBS,
               "logprobs", f"in [0, {MAX_TOP_LOGPROBS}]", self.logprobs)
        for token_id, bias in self.logit_bias.items():
            _check(math.isfinite(bias) and -100.0 <= bias <= 100.0, "logit_bias", "made of values in [-100, 100]",
                   {token_id: bias})

    @property
    def is_greedy(self) -> bool:
        """Temperature 0: the most likely token after penalties and bias, no draw."""
        return self.temperature == 0.0
