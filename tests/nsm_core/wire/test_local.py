from __future__ import annotations

import msgspec
import numpy as np
import pytest

from nsm_core.errors import EngineDead
from nsm_core.wire import local as wire
from nsm_core.wire.step_collector import StepCollector, step_of_tokens

MESSAGES: list[wire.ToGateway] = [
    wire.CannotStart("no"),
    wire.Answer(7, raw=bytes(range(256)) * 4),
    wire.Answer(8, raw=b""),
    step_of_tokens(np.array([1, 2]), np.array([3, 2**31]), 5),
]


@pytest.mark.parametrize("num_bytes", [1, 3, 4, 5, 100, 1_030, 10_000])
def test_messages_are_whole_wherever_the_pieces_end(num_bytes: int) -> None:
    raw = b"".join(map(wire.encode, MESSAGES)) * 2
    reader = wire.MessagesToGateway()
    found = [message for at in range(0, len(raw), num_bytes) for message in reader.feed(raw[at : at + num_bytes])]
    assert found == MESSAGES * 2


def test_a_message_that_is_none_of_an_engine_is_refused() -> None:
    reader = wire.MessagesToGateway()
    with pytest.raises(msgspec.DecodeError):
        list(reader.feed(wire.encode(wire.Cancel(1))))


def test_an_error_of_an_engine_crosses() -> None:
    (answer,) = wire.MessagesToGateway().feed(wire.encode(wire.Answer(1, error=EngineDead("gone"))))
    assert isinstance(answer, wire.Answer)
    assert (type(answer.error), str(answer.error)) == (EngineDead, "gone")


def test_a_step_of_plain_tokens_alone_is_what_a_collector_gives() -> None:
    numbers, ids, collector = np.array([4, 9]), np.array([100, 7]), StepCollector()
    collector.add_tokens(numbers, ids)
    assert step_of_tokens(numbers, ids, 3) == collector.take(3)
