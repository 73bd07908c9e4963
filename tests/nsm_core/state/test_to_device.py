"""Pinned memory that is filled again and again, without a GPU: with memory and events that only look like one's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from nsm_core.state import to_device
from nsm_core.state.to_device import PinnedRing, copy_to_device

HALF_BYTES = 64
STREAM: Any = "a stream"


class FakeEvent:
    """Notes who waits for it."""

    waited: list[FakeEvent]
    recorded: list[FakeEvent]

    def record(self, stream: object) -> None:
        assert stream is STREAM
        self.recorded.append(self)

    def synchronize(self) -> None:
        self.waited.append(self)


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> PinnedRing:
    FakeEvent.waited, FakeEvent.recorded = [], []
    real_empty = torch.empty

    def pageable(*size: int, pin_memory: bool, **options: Any) -> torch.Tensor:
        assert pin_memory
        return real_empty(*size, **options)

    monkeypatch.setattr(to_device, "HALF_BYTES", HALF_BYTES)
    monkeypatch.setattr(torch, "empty", pageable)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    return PinnedRing(STREAM)


def test_a_half_is_filled_again_only_after_the_copies_that_left_it(ring: PinnedRing) -> None:
    """Each half holds two values of 20 bytes, at multiples of 16, or one of 64."""
    values = [np.arange(5, dtype=np.int32) + 10 * number for number in range(4)]
    halves = [[ring.filled(values[0]), ring.filled(values[1])], [ring.filled(values[2]), ring.filled(values[3])]]
    assert (len(FakeEvent.recorded), FakeEvent.waited) == (1, [])
    for filled, value in zip([*halves[0], *halves[1]], values, strict=True):
        assert filled.view(torch.int32).tolist() == value.tolist()
        assert filled.storage_offset() % 16 == 0
    whole = ring.filled(np.arange(8))
    assert FakeEvent.waited == FakeEvent.recorded[:1]
    assert whole.data_ptr() == halves[0][0].data_ptr()
    assert halves[1][0].view(torch.int32).tolist() == values[2].tolist()
    ring.filled(np.zeros(1))
    assert FakeEvent.waited == FakeEvent.recorded[:2]


def test_values_that_are_not_contiguous_arrive_in_their_order(ring: PinnedRing) -> None:
    values = np.arange(12, dtype=np.int32).reshape(3, 4).T
    assert ring.filled(values).view(torch.int32).tolist() == values.reshape(-1).tolist()


def test_without_a_gpu_the_values_are_copied_at_once() -> None:
    to = torch.zeros(2, 3, dtype=torch.int64)
    copy_to_device(np.arange(6), to)
    assert to.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_more_than_a_half_is_refused() -> None:
    values = np.zeros(to_device.HALF_BYTES + 1, np.uint8)
    with pytest.raises(ValueError, match="1048577 bytes are more than the 1048576 of a copy"):
        copy_to_device(values, torch.zeros(len(values), dtype=torch.uint8))
    there = torch.ones(to_device.HALF_BYTES, dtype=torch.uint8)
    copy_to_device(values[1:], there)
    assert not there.any()
