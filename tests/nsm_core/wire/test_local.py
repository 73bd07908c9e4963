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


@pytest.mark.parametrize("size", [0, 1, wire.PART_BYTES, wire.PART_BYTES + 1, 3 * wire.PART_BYTES, 200_000])
def test_an_answer_with_a_state_crosses_in_short_messages(size: int) -> None:
    answer = wire.Answer(3, raw=bytes(index % 251 for index in range(size)))
    sent = list(wire.encode_in_parts(answer))
    *parts, last = (message for data in sent for message in wire.MessagesToGateway().feed(data))
    assert isinstance(last, wire.Answer)
    assert [part.number for part in parts if isinstance(part, wire.AnswerPart)] == [3] * len(parts)
    raw = b"".join(part.raw for part in parts if isinstance(part, wire.AnswerPart)) + (last.raw or b"")
    assert (raw, last.number) == (answer.raw, 3)
    assert max(map(len, sent)) < wire.PART_BYTES + 100


def test_an_answer_without_a_state_is_one_message() -> None:
    answer = wire.Answer(3, error=EngineDead("gone"))
    assert list(wire.encode_in_parts(answer)) == [wire.encode(answer)]


def test_a_step_of_plain_tokens_alone_is_what_a_collector_gives() -> None:
    numbers, ids, collector = np.array([4, 9]), np.array([100, 7]), StepCollector()
    collector.add_tokens(numbers, ids)
    assert step_of_tokens(numbers, ids, 3) == collector.take(3)
