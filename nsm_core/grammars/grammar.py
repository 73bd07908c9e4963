"""The form that an answer must have, as a plain value: it crosses to other processes and lies in turns' records."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Literal, get_args

from nsm_core.errors import InvalidRequest

Kind = Literal["json_schema", "regex", "choice", "lark", "tools"]
KINDS: tuple[str, ...] = get_args(Kind)
MAX_GRAMMAR_BYTES = 256 * 1024  # of one source


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """`source`: a JSON schema, a regular expression, a JSON list of texts, a grammar in llguidance's form of Lark, or
    tools (`tools_grammar`).

    `prefix`: a text that stands in front of the answer. `scope`: compiled forms are shared within one scope only (a
    gateway names the tenant). `param`: the field of the request that refusals name; it changes nothing else.
    """

    kind: Kind
    source: str
    prefix: str = ""
    scope: str = ""
    param: str = dataclasses.field(default="grammar", compare=False)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidRequest(
                f"a grammar's kind must be one of {', '.join(KINDS)}, got {self.kind!r}", param=self.param
            )
        try:
            num_bytes = len(self.source.encode())
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"{self.param} must be valid Unicode (no unpaired surrogates)", param=self.param
            ) from error
        if num_bytes > MAX_GRAMMAR_BYTES:
            message = f"{self.param} must have at most {MAX_GRAMMAR_BYTES} bytes, got {num_bytes}"
            raise InvalidRequest(message, param=self.param)

    def to_fields(self) -> dict[str, str]:
        """As JSON values; `from_fields` is the inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Grammar:
        """Raises InvalidRequest for fields that are no grammar's."""
        known = {field.name for field in dataclasses.fields(cls)}
        if not fields.keys() <= known or not all(isinstance(value, str) for value in fields.values()):
            raise InvalidRequest(f"a grammar is an object of texts: {', '.join(sorted(known))}", param="grammar")
        if not {"kind", "source"} <= fields.keys():
            raise InvalidRequest("a grammar needs kind and source", param="grammar")
        return cls(**fields)


def json_schema_grammar(schema: Mapping[str, Any], *, param: str, prefix: str = "") -> Grammar:
    """The answer is a JSON value that the schema allows, its properties in the order in which the schema has them."""
    return Grammar(kind="json_schema", source=json.dumps(schema, ensure_ascii=False), param=param, prefix=prefix)
