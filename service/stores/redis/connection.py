"""redis-py's client of one server with less work for each command: a turn's client waits for two scripts.

Left out are locks around what does not wait, measurements that nobody reads, and retries: ours are outside.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from redis.asyncio import Connection, ConnectionPool, Redis, SSLConnection
from redis.connection import HiredisRespSerializer

UNPACKED = ("SET", "SETRANGE")  # their values may be megabytes, which packing would copy
UNSENT_BYTES = 64 * 1024  # that may wait in the transport: its own limit, below which nobody has to wait for the socket
_IN_C = HiredisRespSerializer()


class _ShortCommands:
    """Packs commands in C, and sends them without a task and a time-out of their own."""

    _writer: Any
    is_connected: bool

    def pack_command(self, *args: Any) -> list[bytes]:
        """Raises DataError."""
        if args[0] in UNPACKED:
            packed: list[bytes] = super().pack_command(*args)  # type: ignore[misc]
            return packed
        in_one_piece: list[bytes] = _IN_C.pack(*args)
        return in_one_piece

    async def send_packed_command(self, command: bytes | str | Iterable[bytes], check_health: bool = True) -> None:
        """A connection that was lost is found by whoever reads the answer."""
        if not (self.is_connected and isinstance(command, list)):
            await super().send_packed_command(command, check_health)  # type: ignore[misc]
            return
        if check_health:
            await self.check_health()  # type: ignore[attr-defined]
        try:
            self._writer.writelines(command)
        except BaseException:
            await self.disconnect(nowait=True)  # type: ignore[attr-defined]
            raise
        if self._writer.transport.get_write_buffer_size() > UNSENT_BYTES:
            await super().send_packed_command([], check_health=False)  # type: ignore[misc]


class ShortConnection(_ShortCommands, Connection):
    """To a server in plain text."""


class ShortSSLConnection(_ShortCommands, SSLConnection):
    """To a server over TLS."""


class ShortPool(ConnectionPool):
    """Gives each command the connection that was used last."""

    async def get_connection(self, *_: Any, **__: Any) -> Any:
        connection = self.get_available_connection()  # type: ignore[no-untyped-call]
        try:
            await self.ensure_connection(connection)
        except BaseException:
            await self.release(connection)
            raise
        return connection

    async def release(self, connection: Any) -> None:
        self._in_use_connections.remove(connection)
        try:
            if connection.should_reconnect():
                await connection.disconnect()
        finally:
            self._available_connections.append(connection)


class ShortRedis(Redis):
    """The client of one server. A connection that fails, or whose command is cancelled, is closed by itself."""

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        pool = self.connection_pool
        connection = await pool.get_connection()  # type: ignore[no-untyped-call]
        try:
            await connection.send_command(*args)
            return await self.parse_response(connection, args[0], **options)
        finally:
            await pool.release(connection)
