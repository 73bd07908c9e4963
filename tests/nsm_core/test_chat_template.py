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
