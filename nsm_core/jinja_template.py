"""Chat templates in Jinja, as Hugging Face's files have them. They come with a model and run in a sandbox.

The variables are those of `transformers`: `messages`, `add_generation_prompt`, `tools` and `documents` (none), names of
special tokens (empty: the server places such tokens itself), `raise_exception`, `strftime_now`, and `tojson`.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nsm_core.errors import CheckpointError, InvalidRequest

MAX_TEMPLATE_CHARS = 1 << 18
MAX_REPEATED = 1 << 16  # items or characters that a template may make of fewer with `*`
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class _Sandbox(ImmutableSandboxedEnvironment):
    """Also refuses what would take memory without end: `'a' * 10 ** 10`."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (_is_small(left) and _is_small(right)):
            raise SecurityError("a template may not raise numbers to powers")
        for sized, times in ((left, right), (right, left)):
            if hasattr(sized, "__len__") and isinstance(times, int) and len(sized) * times > MAX_REPEATED:
                raise SecurityError(f"a template may not repeat more than {MAX_REPEATED} items")
        return super().call_binop(context, operator, left, right)


def _is_small(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) <= 64


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks an answer for training; to render it is its contents."""

    tags = {"generation"}  # noqa: RUF012  # Jinja's own form

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class JinjaTemplate:
    """A compiled template. Immutable and safe to share between threads."""

    def __init__(self, source: str) -> None:
        """Raises CheckpointError for a template that cannot be compiled."""
        if len(source) > MAX_TEMPLATE_CHARS:
            raise CheckpointError(
                f"a chat template has at most {MAX_TEMPLATE_CHARS} characters, this one {len(source)}"
            )
        rules = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        rules.filters["tojson"] = _to_json
        rules.globals.update(raise_exception=_raise, strftime_now=_now)
        try:
            self._template = rules.from_string(source)
        except (jinja2.TemplateError, RecursionError, ValueError) as error:
            raise CheckpointError(f"the chat template cannot be compiled: {_line(error)}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: bool) -> str:
        """The text that the assistant's answer continues. `variables`: further ones, of templates that know them.

        Raises InvalidRequest with what the template says.
        """
        names = {**dict.fromkeys(SPECIAL_TOKENS, ""), **variables}
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, tools=None, documents=None, **names
            )
        except Exception as error:  # a template may fail in any way that Python has
            raise InvalidRequest(f"the model's chat template refuses this: {_line(error)}", param="messages") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _raise(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without Jinja's escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
