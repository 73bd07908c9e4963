"""WS /v1/realtime: OpenAI's realtime events, for text."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from nsm_core.errors import Overloaded, ServerStopping
from service.deps import Services
from service.realtime.connection import IDLE_S, NORMAL, RealtimeConnection, Socket
from service.realtime.conversation import Conversation
from service.served_models import holding_models

PROTOCOL = "realtime"  # of browsers, which name it beside their key
MAX_CONNECTIONS = 256  # of one process

router = APIRouter(tags=["realtime"])
_open: set[RealtimeConnection] = set()


class _StarletteSocket(Socket):
    def __init__(self, websocket: WebSocket) -> None:
        self._websocket = websocket
        self.code = NORMAL

    async def receive(self) -> bytes | str | None:
        message = await self._websocket.receive()
        if message["type"] == "websocket.disconnect":
            self.code = message.get("code", NORMAL)
            return None
        given: bytes | str | None = message.get("text")
        return given if given is not None else bytes(message["bytes"])

    async def send(self, text: str) -> None:
        if self._websocket.application_state is WebSocketState.CONNECTED:
            await self._websocket.send_text(text)

    async def close(self, code: int, reason: str) -> None:
        await self._websocket.close(code, reason)


@router.get("/v1/realtime", include_in_schema=False)
async def realtime_without_upgrade() -> None:
    """426: the path is a WebSocket's."""
    headers = {"Upgrade": "websocket", "Connection": "Upgrade"}
    raise HTTPException(426, "/v1/realtime is a WebSocket: connect with an Upgrade to websocket", headers)


@router.websocket("/v1/realtime")
async def realtime(websocket: WebSocket) -> None:
    """`model`: as in a body. `session`: the session to go on with; else a new one, whose id `session.created` tells."""
    services: Services = websocket.app.state.services
    if services.lifecycle.is_draining:
        raise ServerStopping
    if len(_open) >= MAX_CONNECTIONS:
        raise Overloaded(f"{MAX_CONNECTIONS} realtime connections are open, which is the limit")
    query = websocket.query_params
    with holding_models():
        conversation = await Conversation.open(
            services,
            websocket.state.caller.tenant,
            model=query.get("model"),
            session_id=query.get("session"),
        )
    offered = websocket.scope.get("subprotocols", [])
    try:
        await websocket.accept(PROTOCOL if PROTOCOL in offered else None)
    except OSError:
        return  # it left before it was let in
    connection = RealtimeConnection(
        _StarletteSocket(websocket),
        services,
        conversation,
        request_id=websocket.state.request_id,
        idle_s=IDLE_S,
    )
    _open.add(connection)
    try:
        await connection.run()
    except WebSocketDisconnect:
        pass  # it left while something was sent to it
    finally:
        _open.discard(connection)
