"""Tools as text and as a grammar: what a model may write when it has some."""

from __future__ import annotations

from typing import Any

import pytest

from nsm_core.chat_template import ChatMessage, get_template
from nsm_core.errors import GrammarFailed, InvalidRequest
from nsm_core.grammars.compiler import GrammarCompiler
from nsm_core.grammars.grammar import Grammar, json_schema_grammar
from nsm_core.grammars.matcher import TokenMatcher
from nsm_core.grammars.tool_calls import Tool, answer_text, call_text, results_message, tools_grammar, with_tools
from nsm_core.tokenizer import Tokenizer
from nsm_core.tool_form import TOOL_FORM_OF, ToolFormName

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
SHOWN = '{"PARAMETER": "VALUE"}'
FORMATS: tuple[ToolFormName, ...] = ("hermes", "rwkv")


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
    return "complete" if matcher.is_complete else "whole" if matcher.inner.is_accepting() else "begun"


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("need", "has_many", "text", "want"),
    [
        ("auto", False, "It is late.\n\nYes", "whole"),
        ("auto", False, "", "whole"),
        ("auto", False, "Let me see. WEATHER", "complete"),
        ("auto", False, "NOW", "complete"),
        ("auto", True, "NOW\nWEATHER", "whole"),
        ("auto", True, "NOW and", "refused"),
        ("auto", False, 'Say OPEN{"name": "rain"', "refused"),
        ("auto", False, 'Say {"name": "rain"}', "whole"),
        ("required", False, "NOW", "complete"),
        ("required", False, "Let", "refused"),
        ("required", False, "WRONG", "refused"),
        ("required", True, "NOW\nNOW", "whole"),
        ("required", True, "BEGUN", "begun"),
    ],
)
def test_calls_and_texts_are_held_to_the_tools(
    compiler: GrammarCompiler,
    tiny_tokenizer: Tokenizer,
    form: ToolFormName,
    need: str,
    has_many: bool,
    text: str,
    want: str,
) -> None:
    now = call_text("now", "{}", form)
    texts = {
        "OPEN": TOOL_FORM_OF[form].open,
        "WEATHER": call_text("weather", '{"town": "Ur </tool_call>``` "}', form),
        "WRONG": call_text("weather", "{}", form),
        "BEGUN": now[:-3],
        "NOW": now,
    }
    for name, written in texts.items():
        text = text.replace(name, written)
    grammar = tools_grammar(TOOLS, need=need, has_many=has_many, calls=form)  # type: ignore[arg-type]
    assert outcome_of(compiler, tiny_tokenizer, grammar, text) == want
    behind = tools_grammar(TOOLS, need=need, has_many=has_many, calls=form, prefix=" ")  # type: ignore[arg-type]
    assert outcome_of(compiler, tiny_tokenizer, behind, " " + text) == want


def test_a_form_takes_the_texts_place(compiler: GrammarCompiler, tiny_tokenizer: Tokenizer) -> None:
    form = Grammar(kind="choice", source='["yes", "no"]')
    grammar = tools_grammar(TOOLS, need="auto", has_many=False, form=form)
    texts = ("yes", call_text("now", "{}", "hermes"), "maybe")
    outcomes = [outcome_of(compiler, tiny_tokenizer, grammar, text) for text in texts]
    assert outcomes == ["complete", "complete", "refused"]


def test_the_tool_whose_schema_is_refused_is_named(compiler: GrammarCompiler) -> None:
    wrong = Tool(name="wrong", description="", parameters={"type": "object", "not": {}}, param="tools[7].parameters")
    with pytest.raises(InvalidRequest, match="not") as refusal:
        compiler.matcher(tools_grammar([*TOOLS, wrong], need="auto", has_many=False))
    assert refusal.value.param == "tools[7].parameters"


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (
            {"required": ["a"], "patternProperties": {"^a$": {}}, "additionalProperties": False},
            "patternProperties beside",
        ),
        ({"not": {}}, "not"),
    ],
)
def test_P10_a_form_beside_tools_is_tried_as_one_without_them(
    compiler: GrammarCompiler, form: dict[str, Any], reason: str
) -> None:
    named = json_schema_grammar({"type": "object", **form}, param="response_format.json_schema.schema")
    with pytest.raises(InvalidRequest, match=reason) as refusal:
        compiler.check(tools_grammar(TOOLS, need="auto", has_many=False, form=named))
    assert (refusal.value.param, refusal.value.code) == (named.param, "invalid_grammar")


def test_tools_calls_and_results_stand_in_messages() -> None:
    messages = with_tools([ChatMessage("system", "Be brief."), ChatMessage("user", "Hi")], TOOLS, "hermes")
    assert messages[0].content.startswith("Be brief.\n\nThese tools can be called:\n")
    assert "The weather of a town." in messages[0].content
    assert messages[0].content.endswith(f"{call_text('NAME', SHOWN, 'hermes')} and its result comes next.")
    assert with_tools([ChatMessage("user", "Hi")], [], "hermes")[0].role == "user"
    assert with_tools([ChatMessage("user", "Hi")], TOOLS, "hermes")[0].role == "system"
    now = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    assert answer_text("Let me see.", [("now", "{}")], "hermes") == "Let me see." + now
    two = results_message(["a", "b"], "hermes").content
    assert two == "<tool_response>a</tool_response>\n<tool_response>b</tool_response>"


def test_rwkv_models_read_the_form_that_they_were_trained_on() -> None:
    tool = Tool(name="now", description="The time.", parameters={"type": "object", "properties": {}})
    chat = [
        ChatMessage("user", "How late is it?"),
        ChatMessage("assistant", answer_text("", [("now", "{}")], "rwkv")),
        results_message(['{"time": "noon"}'], "rwkv"),
    ]
    template = get_template("rwkv-v1")
    assert template.tool_form == "rwkv"
    assert template.render(with_tools(chat, [tool], template.tool_form)) == (
        'System: Tools:\n[{"name": "now", "description": "The time.", '
        '"parameters": {"type": "object", "properties": {}}}]\n'
        "Return only a JSON function call.\n\n"
        "User: How late is it?\n\n"
        'Assistant: ```json\n{"name": "now", "arguments": {}}\n```\n\n'
        'User: Function output:\n{"time": "noon"}\n\n'
        "Assistant:"
    )
