"""Grammars over a real vocabulary: what they allow, refuse, keep and cost."""

from __future__ import annotations

import asyncio
import json
import threading

import numpy as np
import pytest

from nsm_core.errors import GrammarFailed, InvalidRequest, Overloaded
from nsm_core.grammars import compiler as compiler_module
from nsm_core.grammars.compiler import CompilePool, GrammarCompiler
from nsm_core.grammars.grammar import MAX_GRAMMAR_BYTES, Grammar, json_schema_grammar
from nsm_core.grammars.matcher import TokenMatcher, fill_masks, mask_width
from nsm_core.tokenizer import Tokenizer

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": (json_schema_grammar(PERSON, param="p"), '{"name": "Ann", "age": 7}', '{"age": 7}'),
    "prefix": (json_schema_grammar(PERSON, param="p", prefix=" "), ' {"name": "Ann", "age": 7}', '{"name"'),
    "regex": (Grammar(kind="regex", source="[a-c]{2}[0-9]"), "ab1", "ad"),
    "choice": (Grammar(kind="choice", source='["yes", "no \\"é\\""]'), 'no "é"', "nope"),
    "lark": (Grammar(kind="lark", source='start: "a"+ "b"'), "aab", "aac"),
    "lark behind a prefix": (Grammar(kind="lark", source='start: "a"+ "b"', prefix="> "), "> aab", "aab"),
}


@pytest.fixture(scope="module")
def compiler(tiny_tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tiny_tokenizer)


def read(matcher: TokenMatcher, tokenizer: Tokenizer, text: str) -> None:
    for token_id in tokenizer.encode(text):
        matcher.advance(token_id)


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_text_of_the_grammar_is_complete_and_another_fails(
    compiler: GrammarCompiler, tiny_tokenizer: Tokenizer, name: str
) -> None:
    grammar, good, bad = GRAMMARS[name]
    matcher = compiler.matcher(grammar)
    read(matcher, tiny_tokenizer, good)
    assert matcher.is_complete
    with pytest.raises(GrammarFailed, match="within its grammar"):
        read(compiler.matcher(grammar), tiny_tokenizer, bad)


@pytest.mark.parametrize("name", GRAMMARS)
def test_masks_allow_the_tokens_that_can_be_read_and_of_a_forced_text_the_tokenizers_own(
    compiler: GrammarCompiler, tiny_tokenizer: Tokenizer, name: str
) -> None:
    grammar, good, _ = GRAMMARS[name]
    matcher, vocab_size = compiler.matcher(grammar), tiny_tokenizer.vocab_size
    for token_id in tiny_tokenizer.encode(good):
        words = np.zeros((1, mask_width(vocab_size)), np.int32)
        fill_masks(words, [(matcher, 0, ())])
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
        forced = matcher.inner.compute_ff_tokens()
        readable = [one for one in range(1, vocab_size) if matcher.num_valid([one]) == 1]
        assert allowed == (forced[:1] or readable)
        matcher.advance(token_id)


def test_masks_of_drafts_are_those_of_single_steps(compiler: GrammarCompiler, tiny_tokenizer: Tokenizer) -> None:
    grammar, good, _ = GRAMMARS["schema"]
    ids = tiny_tokenizer.encode(good)[:6]
    drafted, stepped = compiler.matcher(grammar), compiler.matcher(grammar)
    width = mask_width(tiny_tokenizer.vocab_size)
    at_once, singly = np.zeros((7, width), np.int32), np.zeros((7, width), np.int32)
    fill_masks(at_once, [(drafted, 0, ids)])
    for row, token_id in enumerate([*ids, None]):
        fill_masks(singly, [(stepped, row, ())])
        if token_id is not None:
            stepped.advance(token_id)
    assert at_once.tolist() == singly.tolist()
    assert drafted.num_valid(ids) == len(ids)  # the drafts did not move it


def test_a_copy_goes_its_own_way(compiler: GrammarCompiler, tiny_tokenizer: Tokenizer) -> None:
    matcher = compiler.matcher(GRAMMARS["choice"][0])
    copy = matcher.copy()
    read(matcher, tiny_tokenizer, "yes")
    assert matcher.is_complete
    assert not copy.is_complete
    read(copy, tiny_tokenizer, 'no "é"')


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "object", "properties": {"a": {"not": {"type": "string"}}}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "string", "format": "colour"}, "format: colour"),
        ({"type": "strin"}, "strin"),
        ({"$ref": "#/nowhere"}, "nowhere"),
        ({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}, "uniqueItems"),
    ],
)
def test_a_schema_that_cannot_be_held_to_is_refused_by_its_keyword(
    compiler: GrammarCompiler, schema: dict[str, object], reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason) as refusal:
        compiler.matcher(json_schema_grammar(schema, param="response_format.json_schema.schema"))
    assert (refusal.value.param, refusal.value.code) == ("response_format.json_schema.schema", "invalid_grammar")


@pytest.mark.parametrize(("kind", "source"), [("regex", "a("), ("lark", "start: nowhere"), ("json_schema", "[1]")])
def test_a_source_that_is_no_grammar_is_refused(compiler: GrammarCompiler, kind: str, source: str) -> None:
    with pytest.raises(InvalidRequest):
        compiler.matcher(Grammar.from_fields({"kind": kind, "source": source}))


def test_a_form_that_passes_a_limit_at_its_first_token_is_too_complex(
    monkeypatch: pytest.MonkeyPatch, tiny_tokenizer: Tokenizer
) -> None:
    monkeypatch.setitem(compiler_module.LIMITS, "step_lexer_fuel", 1)
    with pytest.raises(InvalidRequest, match="becomes too large") as refusal:
        GrammarCompiler(tiny_tokenizer).matcher(Grammar(kind="regex", source="((.{1,50}a){1,50}){1,50}"))
    assert refusal.value.code == "grammar_too_complex"


def test_compiled_grammars_are_kept_in_their_scope(monkeypatch: pytest.MonkeyPatch, tiny_tokenizer: Tokenizer) -> None:
    monkeypatch.setattr(compiler_module, "MAX_STORED", 2)
    compiler, compiled = GrammarCompiler(tiny_tokenizer), []
    make = compiler._compile
    monkeypatch.setattr(compiler, "_compile", lambda grammar: compiled.append(grammar.source) or make(grammar))
    for scope, source in [("a", "x"), ("a", "x"), ("b", "x"), ("a", "y"), ("a", "z"), ("a", "y"), ("a", "x")]:
        compiler.matcher(Grammar(kind="regex", source=source, scope=scope))
    assert compiled == ["x", "x", "y", "z", "x"]


def test_a_grammar_crosses_as_fields_and_a_wrong_one_is_refused() -> None:
    grammar = Grammar(kind="regex", source="a", prefix=" ", scope="tenant", param="guided_regex")
    assert Grammar.from_fields(json.loads(json.dumps(grammar.to_fields()))) == grammar
    for wrong in ({"kind": "regex"}, {"kind": "other", "source": "a"}, {"kind": "regex", "source": 1}):
        with pytest.raises(InvalidRequest):
            Grammar.from_fields(wrong)
    with pytest.raises(InvalidRequest, match="at most"):
        Grammar(kind="regex", source="a" * (MAX_GRAMMAR_BYTES + 1))


async def test_a_pool_compiles_off_the_loop(tiny_tokenizer: Tokenizer) -> None:
    pool = CompilePool(GrammarCompiler(tiny_tokenizer))
    await asyncio.gather(*(pool.check(Grammar(kind="regex", source=f"a{number}")) for number in range(3)))
    with pytest.raises(InvalidRequest, match="guided_regex cannot be used"):
        await pool.check(Grammar(kind="regex", source="(", param="guided_regex"))
    pool.close()


async def test_a_scope_with_too_many_grammars_waits_and_others_do_not(
    monkeypatch: pytest.MonkeyPatch, tiny_tokenizer: Tokenizer
) -> None:
    monkeypatch.setattr(compiler_module, "MAX_WAITING_IN_SCOPE", 2)
    compiler, may_go_on = GrammarCompiler(tiny_tokenizer), threading.Event()
    monkeypatch.setattr(compiler, "has", lambda _: may_go_on.wait(60))
    pool = CompilePool(compiler)
    running = [pool.submit(Grammar(kind="regex", source=f"a{number}", scope="a")) for number in range(2)]
    with pytest.raises(Overloaded):
        pool.submit(Grammar(kind="regex", source="b", scope="a"))
    running.append(pool.submit(Grammar(kind="regex", source="b", scope="b")))
    may_go_on.set()
    for future in running:
        await asyncio.wrap_future(future)
    pool.submit(Grammar(kind="regex", source="c", scope="a")).result(30)
    pool.close()
