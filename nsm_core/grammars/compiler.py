"""Grammars -> matchers over one tokenizer, within limits of time and memory; compiled forms are kept for a while."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from nsm_core.errors import InvalidRequest, Overloaded
from nsm_core.grammars.grammar import Grammar, json_schema_grammar
from nsm_core.grammars.matcher import TokenMatcher, fill_masks, mask_width
from nsm_core.grammars.name_patterns import trials_of_patterns
from nsm_core.grammars.one_of import with_disjoint_as_any
from nsm_core.grammars.tool_calls import tools_lark
from nsm_core.grammars.trial import GrammarTrial
from nsm_core.tokenizer import END_OF_TEXT, Tokenizer

if TYPE_CHECKING:  # a first grammar imports it
    from llguidance import LLMatcher, LLTokenizer

MAX_STORED = 32  # compiled grammars of one scope
MAX_SCOPES = 64
MAX_WAITING, MAX_WAITING_IN_SCOPE = 256, 64  # grammars that wait to be compiled
MAX_REASON_CHARS = 300
TRIED_TOKENS = 8  # of an answer, behind the prefix
NOT_VERBOSE = "<non-verbose/>"  # the library's mark in its errors
# The library's word for a `oneOf` that it lacks, and ours: no client can set that option
ONE_OF, ONE_OF_REASON = (
    "coerce_one_of",
    "a oneOf has parts that may match the same value: give each part another type or constant, or each object a "
    "required property with another constant; or use anyOf",
)
PATTERNS_REASON = (
    "patternProperties beside additionalProperties: false match no names but those of properties and required: leave "
    "them out"
)
NO_ANSWER = "NoExtensionBias"  # the library's word where a form allows no token and no end
# Bounds of the library's work, far above what schemas of APIs need: tests/nsm_core/grammars/test_hostile.py
LIMITS: dict[str, Any] = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 10_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
# One form of white space, as Python's json writes it: a model that may write any amount of it sometimes never stops.
# Unknown keywords are refused, also where the schema itself asks for lenience.
JSON_OPTIONS: dict[str, Any] = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "coerce_one_of": False,
    "lenient": False,
}
ANSWER = "answer"  # the name of the grammar behind a prefix


class GrammarCompiler:
    """Any thread may call it. The library and its view of the vocabulary are loaded with the first grammar."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stored: OrderedDict[str, OrderedDict[Grammar, TokenMatcher]] = OrderedDict()
        self._lock = threading.Lock()

    @functools.cached_property
    def trial(self) -> GrammarTrial:
        """Shared by all compilers of one tokenizer."""
        return _trial_of(self._tokenizer)

    def has(self, grammar: Grammar) -> bool:
        """Whether the compiled form is stored."""
        with self._lock:
            return grammar in self._stored.get(grammar.scope, ())

    def matcher(self, grammar: Grammar) -> TokenMatcher:
        """A matcher at the start of an answer. Raises InvalidRequest with the library's reason."""
        with self._lock:
            of_scope = self._stored.get(grammar.scope)
            if of_scope is not None and grammar in of_scope:
                of_scope.move_to_end(grammar)
                return of_scope[grammar].copy()
        compiled = self._compile(grammar)
        with self._lock:
            self._store(grammar, compiled)
            return compiled.copy()

    def check(self, grammar: Grammar) -> None:
        """Compiles the grammar, then follows it for some tokens, at which some fail that compile.

        Raises InvalidRequest. It belongs in a process that can be killed.
        """
        for part in _grammars_within(grammar):
            self._follow(part, self._compile(part))
            self._check_patterns(part)
        self._follow(grammar, self.matcher(grammar))
        self._check_patterns(grammar)

    def _check_patterns(self, grammar: Grammar) -> None:
        """Raises InvalidRequest for a schema whose `patternProperties` the library could not end."""
        if grammar.kind != "json_schema":
            return
        for schema, text in trials_of_patterns(json.loads(grammar.source)):
            inner = self._compile(json_schema_grammar(schema, param=grammar.param)).inner
            if inner.consume_tokens(self._tokenizer.encode(text)):
                inner.compute_bitmask()
                if NO_ANSWER in inner.get_error():
                    raise _refusal(grammar, PATTERNS_REASON)

    def _follow(self, grammar: Grammar, matcher: TokenMatcher) -> None:
        """Raises InvalidRequest if the library cannot go on."""
        inner, width = matcher.inner, mask_width(self._tokenizer.vocab_size)
        for _ in range(len(grammar.prefix.encode()) + TRIED_TOKENS):
            words = np.zeros((1, width), np.int32)
            fill_masks(words, [(matcher, 0, ())])
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            allowed = allowed[allowed != self._tokenizer.end_of_text_id]
            if inner.is_stopped() or not len(allowed):
                break
            inner.consume_token(int(allowed[-1]))
        if inner.is_error():
            raise _failure(grammar, inner)

    def _store(self, grammar: Grammar, compiled: TokenMatcher) -> None:
        of_scope = self._stored.setdefault(grammar.scope, OrderedDict())
        self._stored.move_to_end(grammar.scope)
        of_scope[grammar] = compiled
        of_scope.move_to_end(grammar)
        if len(of_scope) > MAX_STORED:
            of_scope.popitem(last=False)
        if len(self._stored) > MAX_SCOPES:
            self._stored.popitem(last=False)

    def _compile(self, grammar: Grammar) -> TokenMatcher:
        try:
            compiled = self._read(grammar)
        except (ValueError, RecursionError) as error:
            raise _refusal(grammar, str(error)) from error
        is_read = not compiled.is_error()
        compiled.compute_bitmask()  # some fail at their first token only
        if not compiled.is_error():
            return TokenMatcher(compiled)
        for part in _grammars_within(grammar):
            self._compile(part)
        raise _failure(grammar, compiled) if is_read else _refusal(grammar, compiled.get_error())

    def _read(self, grammar: Grammar) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        return LLMatcher(self._vocabulary, _library_grammar(grammar), log_level=0, limits=LLParserLimits(**LIMITS))

    @functools.cached_property
    def _vocabulary(self) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(_Vocabulary(self._tokenizer)))


_trials: dict[str, GrammarTrial] = {}


def _trial_of(tokenizer: Tokenizer) -> GrammarTrial:
    return _trials.setdefault(tokenizer.fingerprint, GrammarTrial(tokenizer))


class CompilePool:
    """Compiles on a thread of its own, one grammar at a time, so that neither an event loop nor the engine waits.

    A grammar that is not stored is tried in another process first.
    """

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="nsm-grammar")
        self._waiting: Counter[str] = Counter()  # by scope
        self._lock = threading.Lock()

    def submit(self, grammar: Grammar) -> Future[TokenMatcher]:
        """A matcher at the start of an answer, or InvalidRequest. Raises Overloaded."""
        scope = grammar.scope
        with self._lock:
            if self._waiting[scope] >= MAX_WAITING_IN_SCOPE or self._waiting.total() >= MAX_WAITING:
                raise Overloaded("too many grammars wait to be compiled", param=grammar.param)
            self._waiting[scope] += 1
        future = self._thread.submit(self._compile, grammar)
        future.add_done_callback(lambda _: self._count_done(scope))
        return future

    async def check(self, grammar: Grammar) -> None:
        """Returns when the grammar stands. Raises InvalidRequest for one that is refused or takes too long."""
        await asyncio.wrap_future(self.submit(grammar))

    def close(self) -> None:
        """Takes no further grammars; never blocks."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: Grammar) -> TokenMatcher:
        if not self._compiler.has(grammar):
            self._compiler.trial.check(grammar)
        return self._compiler.matcher(grammar)

    def _count_done(self, scope: str) -> None:
        with self._lock:
            self._waiting[scope] -= 1
            if not self._waiting[scope]:
                del self._waiting[scope]


class _Vocabulary:
    """A tokenizer as llguidance reads it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.end_of_text_id
        self.bos_token_id: int | None = None
        texts = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
        # special tokens have no bytes; under names of their own, no grammar's text is ever one of them
        names = {token_id: f"<|special-{token_id}|>".encode() for token_id, raw in enumerate(texts) if not raw}
        names[tokenizer.end_of_text_id] = END_OF_TEXT.encode()
        self.special_token_ids: Sequence[int] = sorted(names)
        self.tokens: Sequence[bytes] = [names.get(token_id, raw) for token_id, raw in enumerate(texts)]

        # the library asks for the ids of each text that a grammar forces, at each of its tokens: few texts, many times
        self._encode = functools.lru_cache(maxsize=4096)(tokenizer.encode_bytes)

    def __call__(self, text: bytes | str) -> list[int]:
        return self._encode(text if isinstance(text, bytes) else text.encode())


def _library_grammar(grammar: Grammar) -> str:
    """The library's own notation, as JSON."""
    answer, *named = _parts(grammar.kind, grammar.source)
    if not grammar.prefix:
        return json.dumps({"grammars": [answer, *named]})
    start = {"lark_grammar": f"start: {_literal(grammar.prefix)} @{ANSWER}"}
    return json.dumps({"grammars": [start, {**answer, "name": ANSWER}, *named]})


def _parts(kind: str, source: str) -> list[dict[str, Any]]:
    """The answer's own grammar, then those that it names."""
    if kind == "json_schema":
        return [_schema_part(json.loads(source))]
    if kind == "regex":
        from llguidance import LLMatcher

        return [{"lark_grammar": json.loads(LLMatcher.grammar_from_regex(source))["grammars"][0]["lark_grammar"]}]
    if kind == "choice":
        return [{"lark_grammar": "start: " + " | ".join(_literal(text) for text in json.loads(source))}]
    return _tools_parts(json.loads(source)) if kind == "tools" else [{"lark_grammar": source}]


def _schema_part(schema: Any) -> dict[str, Any]:
    if not isinstance(schema, dict):
        raise ValueError("a schema must be a JSON object")
    return {"json_schema": {**with_disjoint_as_any(schema), "x-guidance": JSON_OPTIONS}}


def _tools_parts(source: dict[str, Any]) -> list[dict[str, Any]]:
    tools, form = source["tools"], source["form"]
    lark = tools_lark(
        [name for name, _ in tools],
        need=source["need"],
        has_many=source["has_many"],
        has_form=form is not None,
        calls=source.get("calls", "hermes"),  # of a turn that an earlier build began
    )
    parts = [{"name": f"arguments_{index}", **_schema_part(schema)} for index, (_, schema) in enumerate(tools)]
    if form is not None:
        parts += [{**part, "name": "form"} for part in _parts(form["kind"], form["source"])]
    return [{"lark_grammar": lark}, *parts]


def _grammars_within(grammar: Grammar) -> list[Grammar]:
    """The schema of each tool's arguments, and the form that a text beside them has, as grammars under their names."""
    if grammar.kind != "tools":
        return []
    source = json.loads(grammar.source)
    found = [
        json_schema_grammar(parameters, param=param)
        for (_, parameters), param in zip(source["tools"], source["params"], strict=True)
    ]
    return found if source["form"] is None else [*found, Grammar(**{"param": grammar.param, **source["form"]})]


def _literal(text: str) -> str:
    """A text as a literal of Lark."""
    return json.dumps(text, ensure_ascii=False)


def _failure(grammar: Grammar, inner: LLMatcher) -> InvalidRequest:
    """The refusal of a grammar that was read but cannot be followed."""
    if NO_ANSWER in inner.get_error():
        return _refusal(grammar, "no answer can have this form")
    return _refusal(grammar, "it becomes too large while an answer is written", "grammar_too_complex")


def _refusal(grammar: Grammar, reason: str, code: str = "invalid_grammar") -> InvalidRequest:
    reason = ONE_OF_REASON if ONE_OF in reason else reason
    line = " ".join(reason.replace(NOT_VERBOSE, "").split())[:MAX_REASON_CHARS]
    return InvalidRequest(f"{grammar.param} cannot be used as a grammar: {line}", param=grammar.param, code=code)
