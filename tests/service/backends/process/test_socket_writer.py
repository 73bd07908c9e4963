from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator

import pytest

from service.backends.process.socket_writer import SocketWriter

WAIT_S = 60.0
SIZE = 10_000  # of a message: its first byte is the writer's, the others say which it is


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        yield ours, theirs


def message(writer: int, number: int) -> bytes:
    return bytes([writer]) + number.to_bytes(4, "little") * ((SIZE - 1) // 4) + b"\n" * ((SIZE - 1) % 4)


async def test_messages_of_two_threads_stay_whole_and_in_order(ends: tuple[socket.socket, socket.socket]) -> None:
    loop = asyncio.get_running_loop()
    writer, counts = SocketWriter(ends[0].fileno(), loop), (200, 200)
    thread = threading.Thread(target=lambda: [writer.write(message(1, number)) for number in range(counts[1])])
    thread.start()
    for number in range(counts[0]):
        writer.write(message(0, number))
    found: list[list[bytes]] = [[], []]
    async with asyncio.timeout(WAIT_S):
        raw = b""
        while len(raw) < SIZE * sum(counts):  # nobody has read until now
            raw += await loop.sock_recv(ends[1], 2**20)
    thread.join()
    writer.close()
    for at in range(0, len(raw), SIZE):
        found[raw[at]].append(raw[at : at + SIZE])
    for index, count in enumerate(counts):
        assert found[index] == [message(index, number) for number in range(count)]


async def test_nothing_is_written_now_while_something_waits(ends: tuple[socket.socket, socket.socket]) -> None:
    loop = asyncio.get_running_loop()
    writer, raw = SocketWriter(ends[0].fileno(), loop), b""
    assert writer.write_now(b"first")
    writer.write(bytes(2**22))
    assert not writer.write_now(b"later")
    async with asyncio.timeout(WAIT_S):
        while len(raw) < 5 + 2**22:
            raw += await loop.sock_recv(ends[1], 2**20)
    assert raw == b"first" + bytes(2**22)
    assert writer.write_now(b"last")
    assert await loop.sock_recv(ends[1], 100) == b"last"
    writer.close()


async def test_writes_after_the_reader_left_and_after_the_end_are_dropped(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    writer = SocketWriter(ends[0].fileno(), asyncio.get_running_loop())
    ends[1].close()
    writer.write(b"dropped")
    assert writer.write_now(b"dropped too")
    writer.close()
    writer.close()
    writer.write(b"and this")
    assert ends[0].fileno() >= 0  # its owner closes it


async def test_what_may_come_later_lets_other_messages_pass(ends: tuple[socket.socket, socket.socket]) -> None:
    loop = asyncio.get_running_loop()
    writer, has_begun = SocketWriter(ends[0].fileno(), loop), asyncio.Event()

    def messages() -> Iterator[bytes]:
        for number in range(400):
            has_begun.set()
            yield message(0, number)

    writer.write_later(messages())
    async with asyncio.timeout(WAIT_S):
        await has_begun.wait()
        writer.write(message(1, 0))
        raw = b""
        while len(raw) < SIZE * 401:  # what nobody has read fills the socket
            raw += await loop.sock_recv(ends[1], 2**20)
    writer.close()
    found = [raw[at : at + SIZE] for at in range(0, len(raw), SIZE)]
    assert 0 < found.index(message(1, 0)) < 400
    assert [one for one in found if one[0] == 0] == [message(0, number) for number in range(400)]


async def test_a_message_is_not_made_before_the_socket_takes_it(ends: tuple[socket.socket, socket.socket]) -> None:
    loop = asyncio.get_running_loop()
    writer, made = SocketWriter(ends[0].fileno(), loop), list[int]()
    writer.write(bytes(2**22))  # more than the socket takes while nobody reads
    writer.write_later(iter([b"later"]))
    writer.write_later(made.append(number) or b"last" for number in range(1))  # type: ignore[func-returns-value]
    assert not made
    async with asyncio.timeout(WAIT_S):
        raw = b""
        while len(raw) < 2**22 + 9:
            raw += await loop.sock_recv(ends[1], 2**20)
    assert raw[2**22 :] == b"laterlast"
    writer.close()
