"""Tools as text and as a grammar: what a model may write when it has some."""

from __future__ import annotations

import pytest

from nsm_core.chat_template import ChatMessage
from nsm_core.errors import GrammarFailed, InvalidRequest
from nsm_core.grammars.compiler import GrammarCompiler
from nsm_core.grammars.grammar import Grammar
from nsm_core.grammars.matcher import TokenMatcher
from nsm_core.grammars.tool_calls import Tool, answer_text, call_text, results_message, tools_grammar, with_tools
from nsm_core.tokenizer import Tokenizer

TOOLS = [
    Tool(
        name="weather",
        description="The weather of a town.",
        parameters={
            "type": "object",
            "properties": {"town": {"type": "string"}},
            "required": ["town"],
            "additionalProperties": False,
        },
    ),
    Tool(name="now", description="", parameters={"type": "object", "properties": {}, "additionalProperties": False}),
]
WEATHER, NOW = call_text("weather", '{"town": "Ur </tool_call>"}'), call_text("now", "{}")


@pytest.fixture(scope="module")
def compiler(tiny_tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tiny_tokenizer)


def outcome_of(compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: Grammar, text: str) -> str:
    """complete: nothing may follow; whole: it may end; begun; refused."""
    matcher: TokenMatcher = compiler.matcher(grammar)
    try:
        for token_id in tokenizer.encode_bytes(text.encode()):
            matcher.advance(token_id)
    except GrammarFailed:
        return "refused"
    return "complete" if matcher.is_complete else "whole" if matcher.may_end else "begun"


@pytest.mark.parametrize(
    ("need", "has_many", "text", "want"),
    [
        ("auto", False, "It is late.\n\nYes", "whole"),
        ("auto", False, "", "whole"),
        ("auto", False, f"Let me see. {WEATHER}", "complete"),
        ("auto", False, NOW, "complete"),
        ("auto", True, f"{NOW}\n{WEATHER}", "whole"),
        ("auto", True, f"{NOW} and", "refused"),
        ("auto", False, 'Say <tool_call>{"name": "rain"', "refused"),
        ("auto", False, 'Say {"name": "rain"}', "whole"),
        ("required", False, NOW, "complete"),
        ("required", False, "Let", "refused"),
        ("required", False, call_text("weather", "{}"), "refused"),
        ("required", True, f"{NOW}\n{NOW}", "whole"),
        ("required", True, NOW[:-3], "begun"),
    ],
)
def test_calls_and_texts_are_held_to_the_tools(
    compiler: GrammarCompiler, tiny_tokenizer: Tokenizer, need: str, has_many: bool, text: str, want: str
) -> None:
    grammar = tools_grammar(TOOLS, need=need, has_many=has_many)  # type: ignore[arg-type]
    assert outcome_of(compiler, tiny_tokenizer, grammar, text) == want
    behind = tools_grammar(TOOLS, need=need, has_many=has_many, prefix=" ")  # type: ignore[arg-type]
    assert outcome_of(compiler, tiny_tokenizer, behind, " " + text) == want


def test_a_form_takes_the_texts_place(compiler: GrammarCompiler, tiny_tokenizer: Tokenizer) -> None:
    form = Grammar(kind="choice", source='["yes", "no"]')
    grammar = tools_grammar(TOOLS, need="auto", has_many=False, form=form)
    outcomes = [outcome_of(compiler, tiny_tokenizer, grammar, text) for text in ("yes", NOW, "maybe")]
    assert outcomes == ["complete", "complete", "refused"]


def test_the_tool_whose_schema_is_refused_is_named(compiler: GrammarCompiler) -> None:
    wrong = Tool(name="wrong", description="", parameters={"type": "object", "not": {}})
    with pytest.raises(InvalidRequest, match="not") as refusal:
        compiler.matcher(tools_grammar([*TOOLS, wrong], need="auto", has_many=False))
    assert refusal.value.param == "tools[2].function.parameters"


def test_tools_calls_and_results_stand_in_messages() -> None:
    messages = with_tools([ChatMessage("system", "Be brief."), ChatMessage("user", "Hi")], TOOLS)
    assert messages[0].content.startswith("Be brief.\n\nThese tools can be called:\n")
    assert "The weather of a town." in messages[0].content
    assert with_tools([ChatMessage("user", "Hi")], [])[0].role == "user"
    assert with_tools([ChatMessage("user", "Hi")], TOOLS)[0].role == "system"
    assert answer_text("Let me see.", [("now", "{}")]) == "Let me see." + NOW
    assert results_message(["a", "b"]).content == "<tool_response>a</tool_response>\n<tool_response>b</tool_response>"
