"""Sampling parameters of a request. Plain values: no torch here."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from types import MappingProxyType

from nsm_core.errors import InvalidRequest
from nsm_core.grammars.grammar import Grammar

MAX_STOP_STRINGS = 32  # a client's own, and those of a chat template
MAX_STOP_CHARS = 1024  # of one stop string: it is matched on every token
MAX_TOP_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIASES = 1024
MAX_TOP_K = 2**31 - 1
SEED_BITS = 64


# Name, least and greatest value, and how a refusal says it: written once, since every request is checked
_WHOLE_NUMBERS = (
    ("max_tokens", 1, math.inf, "a whole number of at least 1"),
    ("top_k", 0, MAX_TOP_K, f"a whole number in [0, {MAX_TOP_K}]"),
    ("seed", 0, 2**SEED_BITS - 1, f"a whole number in [0, {2**SEED_BITS - 1}]"),
    ("choice_index", 0, 2**SEED_BITS - 1, f"a whole number in [0, {2**SEED_BITS - 1}]"),
    ("min_tokens", 0, math.inf, "a whole number of at least 0"),
    ("logprobs", 0, MAX_TOP_LOGPROBS, f"a whole number in [0, {MAX_TOP_LOGPROBS}]"),
)
_REAL_NUMBERS = (
    ("temperature", 0.0, 2.0, "in [0, 2]"),
    ("min_p", 0.0, 1.0, "in [0, 1]"),
    ("presence_penalty", -2.0, 2.0, "in [-2, 2]"),
    ("frequency_penalty", -2.0, 2.0, "in [-2, 2]"),
)
_POSITIVE_NUMBERS = (("top_p", 1.0, "in (0, 1]"), ("repetition_penalty", 10.0, "in (0, 10]"))


def _check(condition: bool, param: str, expected: str, given: object) -> None:
    if not condition:
        raise InvalidRequest(f"{param} must be {expected}, got {_shown(given)}", param=param)


def _shown(given: object) -> str:
    """Texts and lists as in JSON, where clients wrote them; numbers as Python does, which has NaN and infinity."""
    return json.dumps(given) if isinstance(given, str | list) else repr(given)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The sampling parameters of one request; every value is checked here, once. Raises InvalidRequest.

    The builder of the value always sets `seed` (drawn once if the client gave none), so that a stored turn can be
    repeated. A draw depends on (seed, choice_index, absolute position) only. Token ids are checked against a
    vocabulary by `validate_for_vocab`.
    """

    max_tokens: int = 16
    temperature: float = 1.0  # 0 means greedy
    top_p: float = 1.0  # in (0, 1]
    top_k: int = 0  # 0 means all
    min_p: float = 0.0  # in [0, 1]
    repetition_penalty: float = 1.0  # above 0; 1 means none
    presence_penalty: float = 0.0  # in [-2, 2]
    frequency_penalty: float = 0.0  # in [-2, 2]
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=lambda: MappingProxyType({}))
    seed: int = 0
    choice_index: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0  # before end of text or a stop id may come
    grammar: Grammar | None = None
    logprobs: int | None = None  # None: none; n: the chosen token and the n most likely

    def __post_init__(self) -> None:
        self._check_whole_numbers()
        self._check_real_numbers()
        self._check_stop()
        self._check_constraints()
        for name, given, high in (
            ("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS),
            ("logit_bias", self.logit_bias, MAX_LOGIT_BIASES),
        ):
            if len(given) > high:
                _check(False, name, f"of at most {high} entries", len(given))
        for token_id, bias in self.logit_bias.items():
            is_good = math.isfinite(bias) and -100.0 <= bias <= 100.0
            _check(is_good, "logit_bias", "made of values in [-100, 100]", {token_id: bias})

    def _check_whole_numbers(self) -> None:
        for name, low, high, expected in _WHOLE_NUMBERS:
            value = getattr(self, name)
            if name == "logprobs" and value is None:
                continue
            if not (_is_int(value) and low <= value <= high):
                _check(False, name, expected, value)

    def _check_real_numbers(self) -> None:
        for name, low, high, expected in _REAL_NUMBERS:
            value = getattr(self, name)
            if not low <= value <= high:  # not a number is in no range either
                _check(False, name, expected, value)
        for name, high, expected in _POSITIVE_NUMBERS:
            value = getattr(self, name)
            if not 0.0 < value <= high:
                _check(False, name, expected, value)

    def _check_stop(self) -> None:
        _check(len(self.stop) <= MAX_STOP_STRINGS, "stop", f"at most {MAX_STOP_STRINGS} strings", len(self.stop))
        for text in self.stop:
            _check(text != "", "stop", "made of non-empty strings", list(self.stop))
            expected = f"made of strings of at most {MAX_STOP_CHARS} characters"
            _check(len(text) <= MAX_STOP_CHARS, "stop", expected, f"{text[:20]}… of {len(text)} characters")
            _check(_is_unicode(text), "stop", "made of valid Unicode strings (no unpaired surrogates)", text)

    def _check_constraints(self) -> None:
        if self.min_tokens > self.max_tokens:
            _check(False, "min_tokens", f"at most max_tokens ({self.max_tokens})", self.min_tokens)
        if self.grammar is not None and self.ignore_eos:
            raise InvalidRequest(
                f"ignore_eos excludes {self.grammar.param}: end of text comes where the grammar allows it",
                param="ignore_eos",
            )

    def with_seed(self, seed: int) -> SamplingParams:
        """The same with a seed that is another turn's: nothing is checked again."""
        other = object.__new__(SamplingParams)
        for name in _NAMES:
            object.__setattr__(other, name, getattr(self, name))
        object.__setattr__(other, "seed", seed)
        return other

    @property
    def is_greedy(self) -> bool:
        """Temperature 0: the most likely token after penalties and bias, no draw."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether tokens sampled before change the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def is_constrained(self) -> bool:
        """Whether some tokens are impossible at some positions."""
        return self.grammar is not None or self.min_tokens > 0

    @property
    def is_unadjusted(self) -> bool:
        """Whether tokens are chosen from the raw logits and a mask alone: no log-probabilities, bias or penalties."""
        return self.logprobs is None and not self.logit_bias and not self.has_penalties

    @property
    def is_plain(self) -> bool:
        """Whether tokens are chosen from the raw logits alone: unadjusted, and without masks."""
        return self.is_unadjusted and not self.is_constrained


_NAMES = tuple(field.name for field in dataclasses.fields(SamplingParams))


def top_k_count(top_k: int) -> int:
    """A client's top_k as SamplingParams has it: -1 means all tokens, as 0 does. Raises InvalidRequest."""
    if not -1 <= top_k <= MAX_TOP_K:
        expected = f"-1 or 0 (all tokens), or in [1, {MAX_TOP_K}]"
        raise InvalidRequest(f"top_k must be {expected}, got {str(top_k)[:80]}", param="top_k")
    return max(top_k, 0)


def seed_bits(seed: int) -> int:
    """A client's seed as SamplingParams has it: negative 64-bit numbers count down from 2^64. Raises InvalidRequest."""
    low, high = -(2 ** (SEED_BITS - 1)), 2**SEED_BITS - 1
    if not low <= seed <= high:
        raise InvalidRequest(f"seed must be in [{low}, {high}], got {str(seed)[:80]}", param="seed")
    return seed % (1 << SEED_BITS)


def validate_for_vocab(params: SamplingParams, vocab_size: int) -> None:
    """Every token id that `params` names must be in [0, vocab_size). Raises InvalidRequest naming the field."""
    for name, token_ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        for token_id in token_ids:
            is_known = _is_int(token_id) and 0 <= token_id < vocab_size
            _check(is_known, name, f"made of token ids in [0, {vocab_size - 1}]", token_id)


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
