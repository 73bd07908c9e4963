"""The fields by which a stateless request names its start state and asks for its end state."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from nsm_core.errors import InvalidRequest
from service.schemas.common import RequestBody
from service.schemas.tuned_model import with_named_state


class StateFields(RequestBody):
    """The start state of a stateless request, and its end."""

    state: str | None = Field(
        default=None, description="start from it: name, name@version, or a returned state in base64"
    )
    return_state: bool = Field(default=False, description="answer with the state at the end; for one choice")

    @model_validator(mode="before")
    @classmethod
    def _tuned_model(cls, fields: Any) -> Any:
        return with_named_state(fields)

    def check_returned(self, num_choices: int, *, is_score_only: bool = False) -> None:
        """Raises InvalidRequest where there is not one end state."""
        if self.return_state and (num_choices != 1 or is_score_only):
            given = "a prompt that is only scored" if is_score_only else f"{num_choices} choices"
            raise InvalidRequest(f"return_state is for one choice, got {given}", param="return_state")
