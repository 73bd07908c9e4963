"""One WebSocket of uvicorn, whose handshake an HTTP answer completes as well."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from service.web.errors import answer
from service.web.middleware import refusal_of_connection

if TYPE_CHECKING:
    from uvicorn._types import ASGISendEvent


class WebSocketConnection(WebSocketsSansIOProtocol):
    """uvicorn takes a refusal for an application that forgot the handshake, and would log an error for each. A
    handshake that the library refuses is answered as any other request.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._library_accept = self.conn.accept
        self.conn.accept = self._accept  # type: ignore[method-assign]

    async def send(self, message: ASGISendEvent) -> None:
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and not message.get("more_body", False):
            self.handshake_complete = True

    def _accept(self, request: Any) -> Any:
        """The library's answer to a handshake; a refusal with our body."""
        response = self._library_accept(request)
        if response.status_code == HTTPStatus.SWITCHING_PROTOCOLS:
            return response
        words = bytes(response.body or b"").decode(errors="replace").strip().splitlines()
        error = HTTPException(response.status_code, words[0] if words else response.reason_phrase)
        made = refusal_of_connection(answer(error))
        response.body = bytes(made.body)
        for name, value in made.headers.items():
            response.headers.pop(name, None)
            response.headers[name] = value
        return response
