"""One WebSocket of uvicorn, whose handshake an HTTP answer completes as well."""

from __future__ import annotations

import functools
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.http11 import Request, Response
from websockets.server import ServerProtocol

from service.web.errors import answer

if TYPE_CHECKING:
    from uvicorn._types import ASGISendEvent


class WebSocketConnection(WebSocketsSansIOProtocol):
    """uvicorn takes a refusal for an application that forgot the handshake, and would log an error for each. A
    handshake that the library refuses is answered as any other request.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn.accept = functools.partial(_accept, self.conn)  # type: ignore[method-assign]

    async def send(self, message: ASGISendEvent) -> None:
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and not message.get("more_body", False):
            self.handshake_complete = True


def _accept(protocol: ServerProtocol, request: Request) -> Response:
    response = ServerProtocol.accept(protocol, request)
    if response.status_code == HTTPStatus.SWITCHING_PROTOCOLS:
        return response
    words = bytes(response.body or b"").decode(errors="replace").strip().splitlines()
    made = answer(HTTPException(response.status_code, words[0] if words else response.reason_phrase)).response()
    response.body = bytes(made.body)
    for name in ("Content-Type", "Content-Length"):
        del response.headers[name]
        response.headers[name] = made.headers[name]
    return response
