"""One WebSocket of uvicorn, whose handshake an HTTP answer completes as well."""

from __future__ import annotations

from typing import TYPE_CHECKING

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

if TYPE_CHECKING:
    from uvicorn._types import ASGISendEvent


class WebSocketConnection(WebSocketsSansIOProtocol):
    """uvicorn takes a refusal for an application that forgot the handshake, and would log an error for each."""

    async def send(self, message: ASGISendEvent) -> None:
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and not message.get("more_body", False):
            self.handshake_complete = True
