"""Events out of a stream of bytes, wherever the reads cut it."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from loadtests.sse import Event, EventParser

STREAM = 'id: 3\ndata: {"a": "é"}\n\n: ping\n\ndata: one\ndata: two\n\nevent: x\r\nid: 4\r\ndata: [DONE]\r\n\r\n'
EVENTS = [Event("3", '{"a": "é"}'), Event("", "one\ntwo"), Event("4", "[DONE]")]


@given(cuts=st.lists(st.integers(0, len(STREAM.encode())), max_size=12))
def test_events_do_not_depend_on_where_the_reads_were_cut(cuts: list[int]) -> None:
    raw, parser = STREAM.encode(), EventParser()
    offsets = [0, *sorted(cuts), len(raw)]
    events = [event for start, end in itertools.pairwise(offsets) for event in parser.feed(raw[start:end])]
    assert events == EVENTS


def test_an_event_comes_with_its_last_byte() -> None:
    parser = EventParser()
    assert parser.feed(b"data: 1\n") == []
    assert parser.feed(b"\n") == [Event("", "1")]


def test_done_and_json() -> None:
    assert EVENTS[2].is_done
    assert not EVENTS[0].is_done
    assert EVENTS[0].json() == {"a": "é"}
