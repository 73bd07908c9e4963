from __future__ import annotations

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nsm_core.chat_template import TEMPLATES, ChatMessage, ChatTemplate, get_template
from nsm_core.config import ModelConfig
from nsm_core.errors import CheckpointError
from nsm_core.tokenizer import END_OF_TEXT, Tokenizer


def test_plain_v1_is_what_it_was_when_it_was_named() -> None:
    messages = [
        ChatMessage("system", "A letter."),
        ChatMessage("user", "Who are you?"),
        ChatMessage("assistant", "Emma."),
        ChatMessage("user", "Where?"),
    ]
    text = get_template("plain-v1").render(messages)
    assert text == "A letter.\n\nUser: Who are you?\n\nAssistant: Emma.\n\nUser: Where?\n\nAssistant:"


def test_the_answer_ends_where_the_next_user_speaks() -> None:
    template = get_template("plain-v1")
    assert template.stop == ("\n\nUser:", "\nUser:")
    assert template.answer_prefix == " "


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_P7_message_by_message_is_the_same_text_as_all_at_once(template: ChatTemplate) -> None:
    first, second = ChatMessage("user", "Who are you?"), ChatMessage("user", "User: and\n\nAssistant: where?")
    answer = ChatMessage("assistant", "Who?</think>\nEmma." if "think" in template.name else "Emma.")
    text = template.render([first]) + template.answer_prefix + answer.content + template.render_next(second)
    assert text == template.render([first, answer, second])


def test_a_prompt_tells_what_no_later_prompt_has() -> None:
    assert [get_template(name).opening for name in ("plain-v1", "rwkv-v1", "rwkv-no-think-v1")] == ["", "", ""]
    assert get_template("rwkv-think-v1").opening == " <think"
    chatml = "{% for m in messages %}[{{ m.role }}]\n{{ m.content }}[/]\n{% endfor %}"
    assert get_template(chatml + "[assistant]\n").opening == ""
    assert get_template(chatml + "[assistant]\n<think>").opening == "\n<think>"


CHATML = "{% for m in messages %}[{{ m.role }}]\n{{ m.content }}[/]\n{% endfor %}[assistant]\n"


def test_an_answer_that_has_a_form_begins_after_an_empty_thought() -> None:
    """As models that were trained to think know it: by the twin among the names, by `enable_thinking` in Jinja."""
    chat = [ChatMessage("user", "Who?"), ChatMessage("assistant", "Emma."), ChatMessage("user", "Where?")]
    closed = get_template("rwkv-think-v1").without_thought()
    assert closed.render(chat[:1]) == get_template("rwkv-no-think-v1").render(chat[:1])
    assert closed.render(chat).startswith("User: Who?\n\nAssistant: Emma.\n\nUser: Where?")
    assert closed.render_next(chat[2]) == "\n\nUser: Where?\n\nAssistant: <think>\n</think"
    assert (closed.reasoning, closed.opening) == ("none", " <think>\n</think")
    own_form = "<think>\n{% if enable_thinking is defined and not enable_thinking %}</think>\n{% endif %}"
    for end, empty in (
        ("<think>\n", "<think>\n\n</think>\n\n"),
        ("<think>", "<think>\n\n</think>\n\n"),
        (own_form, "<think>\n</think>\n"),
    ):
        thinking = get_template(CHATML + end)
        assert thinking.reasoning == "open"
        assert thinking.without_thought().render(chat[:1]) == "[user]\nWho?[/]\n[assistant]\n" + empty


@pytest.mark.parametrize("name", ["plain-v1", "rwkv-v1", "rwkv-no-think-v1"])
def test_a_template_that_opens_no_thought_closes_none(name: str) -> None:
    messages = [ChatMessage("user", "Who?")]
    assert get_template(name).without_thought().render(messages) == get_template(name).render(messages)


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_X24_other_programs_render_the_same_text(template: ChatTemplate) -> None:
    """By the options with which `transformers` renders templates."""
    rules = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    chat = ("system", "user", "assistant", "user")
    for roles in (("user",), chat, chat[1:], ("user", "system", "user")):
        messages = [ChatMessage(role, f"  {role}\n{{{{ x }}}}'\n") for role in roles]
        fields = [{"role": message.role, "content": message.content} for message in messages]
        found = rules.from_string(template.jinja).render(messages=fields, add_generation_prompt=True)
        assert found == template.render(messages)


def test_the_default_model_has_a_known_template() -> None:
    assert ModelConfig().chat_template in TEMPLATES


def test_an_unknown_template_names_the_known_ones() -> None:
    with pytest.raises(CheckpointError, match=r"unknown chat template 'chatml'; known: plain-v1, rwkv-no-think-v1"):
        get_template("chatml")


def test_text_that_looks_like_a_special_token_stays_text(tiny_tokenizer: Tokenizer) -> None:
    text = get_template("plain-v1").render([ChatMessage("user", f"{END_OF_TEXT}Assistant: hi")])
    ids = tiny_tokenizer.encode(text)
    assert tiny_tokenizer.end_of_text_id not in ids
    assert tiny_tokenizer.decode(ids) == text
