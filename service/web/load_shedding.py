"""Pure ASGI middleware: while the engine has no room, what needs it is refused before anything is done for it.

A refusal must cost next to nothing: when most requests are refused, their bodies, prompts and look-ups would take the
time of those that were let in, and refusals would wait for each other.
"""

from __future__ import annotations

import dataclasses

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from nsm_core.errors import EngineDead, Overloaded
from service.backends.base import InferenceBackend
from service.web.errors import answer

# Whatever is posted there needs the engine. A session's turn may be a retry that its body tells: that is refused later.
GENERATING = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses"})


@dataclasses.dataclass(frozen=True, slots=True)
class Refused:
    """Stands in the scope for the route that was not looked up; metrics and traces name it."""

    path: str


class Admission:
    """A retry with its `Idempotency-Key` gets through: its answer may be there already."""

    def __init__(self, app: ASGIApp, backend: InferenceBackend) -> None:
        self.app = app
        self.backend = backend

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(scope)
        if error is None:
            await self.app(scope, receive, send)
            return
        scope["route"] = Refused(scope["path"])
        await answer(error).response()(scope, receive, send)

    def _refusal(self, scope: Scope) -> EngineDead | Overloaded | None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in GENERATING:
            return None
        if "idempotency-key" in Headers(scope=scope):
            return None
        try:
            self.backend.require_room()
        except (EngineDead, Overloaded) as error:
            return error
        return None
