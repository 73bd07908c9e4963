"""How much a model shall think before its answer: OpenAI's two ways to say it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import WithJsonSchema, field_validator

from nsm_core.chat_template import ChatTemplate
from service.schemas.common import RequestBody
from service.schemas.ignored_fields import EFFORTS, REASONING, check_ignored

NO_EFFORT = "none"
_MEANING = "none: without the thought that the chat template opens; other efforts change nothing"
REASONING_SCHEMA = {
    "type": "object",
    "properties": {name: {"enum": list(values)} for name, values in REASONING.items()},
    "additionalProperties": False,
    "description": f"effort {_MEANING}",
}
EFFORT_SCHEMA = {"enum": list(EFFORTS), "description": _MEANING}


class ReasoningFields(RequestBody):
    """Of bodies whose answer may begin with a thought."""

    reasoning: Annotated[dict[str, Any] | None, WithJsonSchema(REASONING_SCHEMA)] = None
    reasoning_effort: Annotated[str | None, WithJsonSchema(EFFORT_SCHEMA)] = None

    @field_validator("reasoning", mode="before")
    @classmethod
    def _reasoning_is_known(cls, value: Any) -> Any:
        check_ignored("reasoning", value, dict)
        return value

    @field_validator("reasoning_effort", mode="before")
    @classmethod
    def _effort_is_known(cls, value: Any) -> Any:
        check_ignored("reasoning_effort", value, str)
        return value

    @property
    def absent_reasoning(self) -> set[str]:
        """Names of these fields that the body lacks: a body without them has the digest that it had before them."""
        return {name for name in ReasoningFields.model_fields if getattr(self, name) is None}

    def template_by_effort(self, template: ChatTemplate) -> ChatTemplate:
        """A model that decides itself whether it thinks still does: its thought has to be told from its answer."""
        efforts = (self.reasoning_effort, (self.reasoning or {}).get("effort"))
        is_closed = NO_EFFORT in efforts and template.reasoning == "open"
        return template.without_thought() if is_closed else template
