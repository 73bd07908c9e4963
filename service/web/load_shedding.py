"""Pure ASGI middleware: while the engine has no room, or the control group little memory, generation requests are
refused before their body is read.

A refusal must be cheap. Under overload, reading bodies, prompts and stores for refused requests would take time from
the admitted ones.
"""

from __future__ import annotations

import dataclasses

from starlette.types import ASGIApp, Receive, Scope, Send

from nsm_core.control_group import MemoryWatch
from nsm_core.errors import EngineDead, Overloaded
from service.backends.base import InferenceBackend
from service.web.errors import answer
from service.web.headers import has_header

# POST there needs the engine. A session's turn may be a retry, which only its body shows, so it is refused later.
GENERATING = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings"})
NEEDING_MEMORY = (*sorted(GENERATING), "/generate", "/import")


@dataclasses.dataclass(frozen=True, slots=True)
class Refused:
    """In the scope in place of the route, which was not looked up; metrics and traces use its path."""

    path: str


class ShedLoad:
    """Passes requests with an `Idempotency-Key`: their answer may be stored already."""

    def __init__(self, app: ASGIApp, backend: InferenceBackend | None) -> None:
        """`backend`: None where only the body says which model a request is for."""
        self.app = app
        self.backend = backend
        self.memory = MemoryWatch()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(scope)
        if error is None:
            await self.app(scope, receive, send)
            return
        scope["route"] = Refused(scope["path"])
        await answer(error).response()(scope, receive, send)

    def _refusal(self, scope: Scope) -> EngineDead | Overloaded | None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return None
        if scope["path"].endswith(NEEDING_MEMORY) and self.memory.is_low():
            return Overloaded("the server is short of memory: try again later")  # or the kernel ends it
        if self.backend is None or scope["path"] not in GENERATING:
            return None
        if has_header(scope, b"idempotency-key"):
            return None
        try:
            self.backend.require_room()
        except (EngineDead, Overloaded) as error:
            return error
        return None
