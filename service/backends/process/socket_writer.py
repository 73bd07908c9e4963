"""Writes to a socket from several threads: the loop's, and the engine's own, which wakes no loop for tokens."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections import deque
from collections.abc import Iterator


class SocketWriter:
    """Messages leave whole and in order, whichever thread writes them, and no thread waits for the reader: what the
    socket does not take follows when it can. Those that may come later let the others pass.
    """

    def __init__(self, fd: int, loop: asyncio.AbstractEventLoop) -> None:
        """`fd`: of a connected socket, which stays its owner's; it does not block from now on."""
        self._socket = socket.socket(fileno=os.dup(fd))
        self._socket.setblocking(False)
        self._loop = loop
        self._lock = threading.Lock()
        self._unsent = bytearray()
        self._later: deque[Iterator[bytes]] = deque()
        self._is_closed = False

    def write(self, data: bytes) -> None:
        """Dropped if the reader has left; whoever reads of it sees that."""
        with self._lock:
            if self._unsent:
                self._unsent += data
            else:
                self._send(data)

    def write_now(self, data: bytes) -> bool:
        """`write`, unless something waits for the socket: False, and nothing is written."""
        with self._lock:
            if self._unsent:
                return False
            self._send(data)
            return True

    def write_later(self, messages: Iterator[bytes]) -> None:
        """On the loop: the messages in order, each made when the socket has taken all that was written before."""
        self._later.append(messages)
        self._wait()

    def close(self) -> None:
        """On the loop. What was not sent is dropped."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._loop.remove_writer(self._socket)
                self._socket.close()
                self._unsent.clear()
                self._later.clear()

    def _send(self, data: bytes | bytearray) -> None:
        num_sent = self._num_sent(data)
        if num_sent < len(data):
            self._unsent += data[num_sent:]
            self._loop.call_soon_threadsafe(self._wait)

    def _num_sent(self, data: bytes | bytearray) -> int:
        """How much of it the socket has taken, or dropped."""
        if self._is_closed:
            return len(data)
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:  # the reader has left
            return len(data)

    def _wait(self) -> None:
        """On the loop."""
        with self._lock:
            if (self._unsent or self._later) and not self._is_closed:
                self._loop.add_writer(self._socket, self._send_on)

    def _send_on(self) -> None:
        with self._lock:
            if not self._unsent:
                self._unsent += self._next_later()
            del self._unsent[: self._num_sent(self._unsent)]
            if not self._unsent and not self._later:
                self._loop.remove_writer(self._socket)

    def _next_later(self) -> bytes:
        while self._later:
            message = next(self._later[0], None)
            if message is not None:
                return message
            self._later.popleft()
        return b""
