"""Templates of model files: rendered turn by turn, in a sandbox, or refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsm_core.chat_template import ChatMessage, get_template, read_template
from nsm_core.errors import CheckpointError, InvalidRequest

CHATML = (
    "{%- if messages[0]['role'] == 'system' -%}{%- set rest = messages[1:] -%}"
    "{{ '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}"
    "{%- else -%}{%- set rest = messages -%}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{%- endif -%}"
    "{%- for message in rest -%}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content | trim + '<|im_end|>' + '\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
THINKING = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{{ '<a>' + message.content.split('</think>')[-1] + '</a>' }}"
    "{% else %}{{ '<u>' + message.content + '</u>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<a><think>' }}{% endif %}"
)
LINES = (
    "{%- for message in messages %}"
    "{{- 'User: ' if message['role'] == 'user' else 'Assistant: ' -}}{{- message['content'] -}}{{- '\n' -}}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- 'Assistant:' -}}{%- endif %}"
)


def user(content: str) -> ChatMessage:
    return ChatMessage("user", content)


def test_a_turn_adds_its_own_text_alone() -> None:
    template = get_template(CHATML)
    first = template.render([user("Hello")])
    assert first == (
        "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    added = template.render_next(user("And?"))
    assert added == "<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    whole = template.render([user("Hello"), ChatMessage("assistant", "Hi"), user("And?")])
    assert first + template.answer_prefix + "Hi" + added == whole
    assert (template.stop, template.answer_prefix) == (("<|im_end|>",), "")


def test_what_the_model_writes_before_an_answer_is_known() -> None:
    template = get_template(LINES)
    assert (template.stop, template.answer_prefix) == (("\nUser:",), " ")
    assert template.render_next(user("And?")) == "\nUser: And?\nAssistant:"


def test_a_template_that_drops_old_thoughts_still_adds_new_text_alone() -> None:
    template = get_template(THINKING)
    assert template.render_next(user("And?")) == "</a><u>And?</u><a><think>"
    assert template.stop == ("</a>",)


def test_instructions_stand_in_front_where_a_template_has_no_system_message_of_its_own() -> None:
    source = "{% for m in messages %}{{ '[' ~ m.role ~ ']' ~ m.content ~ '[end]' }}{% endfor %}[assistant]"
    assert get_template(source).render_preface("Be brief.") == "[system]Be brief.[end]"
    for other in (CHATML, "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + source):
        with pytest.raises(InvalidRequest, match="instructions cannot stand before a chat"):
            get_template(other).render_preface("Be brief.")


def test_variables_and_filters_are_those_of_transformers() -> None:
    source = (
        "{{ bos_token }}{{ eos_token }}{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}"
        "{{ strftime_now('%Y') | length }}{{ {'b': 'é<', 'a': 1} | tojson }}"
        "{% for m in messages %}{% if m.role == 'x' %}{% continue %}{% endif %}"
        "{% generation %}{{ m.role[0] ~ m.content }}{% endgeneration %};{% endfor %}"
        "{% if unknown is defined %}!{% endif %}"
    )
    assert get_template(source).render([user("q")]) == '4{"b": "é<", "a": 1}uq;'


def test_what_a_template_refuses_is_the_requests_error() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not\nsupported') }}"
        "{% endif %}{{ m.role ~ ': ' ~ m.content ~ '\n' }}{% endfor %}assistant:"
    )
    with pytest.raises(InvalidRequest, match="refuses this: System role not supported"):
        get_template(source).render([ChatMessage("system", "x"), user("y")])


LOOP = "{% for m in messages %}BODY{% endfor %}"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{% for %}", "cannot be compiled"),
        ("{{ " + "(" * 5000, "cannot be compiled"),
        ("{{ 'x' }}", "turn by turn"),
        (LOOP.replace("BODY", "{{ loop.index ~ m.role ~ m.content }}"), "turn by turn"),
        ("{{ messages[-1].content }}", "turn by turn"),
        (LOOP.replace("BODY", "{{ m.content.__class__.__mro__[1].__subclasses__() }}"), "cannot render a chat"),
        (
            LOOP.replace("BODY", "{{ cycler.__init__.__globals__.os.getcwd() }}"),
            "cannot render a chat",
        ),
        (LOOP.replace("BODY", "{{ messages.append(1) }}"), "cannot render a chat"),
        (LOOP.replace("BODY", "{{ 'a' * 10 ** 100 }}"), "powers"),
        (LOOP.replace("BODY", "{{ 'a' * 10000000000 }}"), "repeat"),
        (LOOP.replace("BODY", "{{ 10000000000 * [1] }}"), "repeat"),
        (LOOP.replace("BODY", "{% for _ in range(10000000) %}{% endfor %}"), "Range too big"),
        (LOOP.replace("BODY", "{% include 'other' %}"), "cannot render a chat"),
        (LOOP.replace("BODY", "{{ m.content ~ 1 / 0 }}"), "division by zero"),
        ("{{ 1 }}" * 100_000, "at most 262144 characters"),
    ],
)
def test_a_template_that_is_of_no_use_or_does_harm_is_refused(source: str, says: str) -> None:
    with pytest.raises(CheckpointError) as refused:
        get_template(source)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_template_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_bytes(b"{{ messages }}\xff")
    with pytest.raises(CheckpointError, match=r"cannot read the chat template '.*': .*invalid start byte"):
        read_template(str(file))
