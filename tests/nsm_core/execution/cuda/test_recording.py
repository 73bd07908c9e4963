"""What happens around the recording of a graph; none is recorded here."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import pytest
import torch

from nsm_core.execution.cuda import recording


class Graph:
    """Notes whether objects are collected while it is recorded."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, bool]] = []

    def capture_begin(self, *_: object) -> None:
        self.calls.append(("begin", gc.isenabled()))

    def capture_end(self) -> None:
        self.calls.append(("end", gc.isenabled()))


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> Graph:
    made = Graph()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: made)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for name in ("Stream", "stream", "device"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: contextlib.nullcontext())
    return made


@pytest.fixture(params=[True, False], ids=["collecting", "paused before"])
def is_collecting(request: pytest.FixtureRequest) -> Iterator[bool]:
    was_enabled = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if was_enabled else gc.disable)()


def test_nothing_is_collected_while_a_graph_is_recorded(graph: Graph, is_collecting: bool) -> None:
    states: list[bool] = []
    recording.record(lambda: states.append(gc.isenabled()), torch.device("cpu"))
    assert states == [is_collecting, False]  # the run before, then the recorded one
    assert graph.calls == [("begin", False), ("end", False)]
    assert gc.isenabled() is is_collecting


def test_a_recording_that_fails_is_ended_and_objects_are_collected_again(graph: Graph, is_collecting: bool) -> None:
    def fail() -> None:
        if graph.calls:
            raise RuntimeError("a kernel is broken")

    with pytest.raises(RuntimeError, match="a kernel is broken"):
        recording.record(fail, torch.device("cpu"))
    assert [name for name, _ in graph.calls] == ["begin", "end"]
    assert gc.isenabled() is is_collecting
