"""Commands that are packed in C and sent without a task of their own arrive as redis-py's would."""

from __future__ import annotations

from typing import Any

import pytest
from redis.asyncio import Connection
from redis.exceptions import DataError

from service.stores.redis.connection import ShortConnection

COMMANDS: tuple[tuple[Any, ...], ...] = (
    ("EVALSHA", "a" * 40, 2, "nsm:{x}:head", "nsm:{x}:log", 2**64 - 1, 0, -5, 0.1, b"\x00\xff\r\n", "", "größe"),
    ("SET", "key", b"x" * 100_000, "EX", 60),
    ("HGETALL", "key"),
)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_command_has_the_bytes_that_redis_py_packs(command: tuple[Any, ...]) -> None:
    assert b"".join(ShortConnection().pack_command(*command)) == b"".join(Connection().pack_command(*command))


def test_megabytes_are_not_copied() -> None:
    value = b"x" * 100_000
    assert any(piece is value for piece in ShortConnection().pack_command("SET", "key", value))


@pytest.mark.parametrize("value", [None, True, [1]])
def test_a_value_that_redis_has_no_bytes_for_is_refused(value: object) -> None:
    with pytest.raises(DataError):
        ShortConnection().pack_command("GET", value)
