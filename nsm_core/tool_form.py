"""The forms in which models write calls of tools in a chat's text. Which one a model was trained on, its chat template
tells; one that was trained on none is held to a form by the grammar all the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

ToolFormName = Literal["hermes", "rwkv"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ToolForm:
    """A call is `open`, one JSON object on a line, `close`; several stand on lines of their own.

    `before` and `after`: what a system message says around the tools, `between`: what stands between two of them.
    A result stands between `result_open` and `result_close`.
    """

    open: str
    close: str
    before: str
    between: str
    after: str
    result_open: str
    result_close: str

    def list_tools(self, tools: Sequence[str]) -> str:
        """What a system message says of the tools, each an object in JSON."""
        return self.before + self.between.join(tools) + self.after


_HERMES_CALL = '<tool_call>{"name": "NAME", "arguments": {"PARAMETER": "VALUE"}}</tool_call>'
TOOL_FORM_OF: Mapping[ToolFormName, ToolForm] = {
    "hermes": ToolForm(
        open="<tool_call>",
        close="</tool_call>",
        before="These tools can be called:\n",
        between="\n",
        after=f"\nA call is written {_HERMES_CALL} and its result comes next.",
        result_open="<tool_response>",
        result_close="</tool_response>",
    ),
    "rwkv": ToolForm(
        open="```json\n",
        close="\n```",
        before="Tools:\n[",
        between=", ",
        after="]\nReturn only a JSON function call.",
        result_open="Function output:\n",
        result_close="",
    ),
}
