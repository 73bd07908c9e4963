"""The shape of a pass, and long passes in segments: while one reads a layer, the next reads the layer before.

A layer's scan of few texts goes token by token and leaves most of a device idle; so several layers run at a time, on
streams of their own. Each kernel does for a token what it does without segments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

FEW_PIECES = 4  # with more texts a layer's scan fills the device by itself
SHORTEST = 256  # tokens of a segment: fewer leave the products too little to do
MOST = 16  # segments of a pass


@dataclasses.dataclass(frozen=True, slots=True)
class PassShape:
    """Tokens, and pieces of text in each segment."""

    num_tokens: int
    num_pieces: int

    @property
    def has_few_texts(self) -> bool:
        """Which have several tokens each, as those of a step do not."""
        return self.num_pieces <= FEW_PIECES and self.num_pieces < self.num_tokens

    @property
    def segment_length(self) -> int:
        """Tokens of each segment but the last."""
        return max(SHORTEST, -(-self.num_tokens // MOST)) if self.has_few_texts else self.num_tokens

    @property
    def num_segments(self) -> int:
        return -(-self.num_tokens // self.segment_length)

    @property
    def width(self) -> int:
        """Numbers that are given of tokens, or of all segments' pieces: of whichever are more."""
        return max(self.num_tokens, self.num_segments * self.num_pieces)


class Stages:
    """Where a segment waits for the one before it. This one never does: launches follow each other, or it is alone."""

    def wait(self, stage: int) -> None:
        """Until the segment before has written the states that belong to the stage."""

    def written(self, stage: int) -> None:
        """Launches from here on write no state of the stage."""


class _Following(Stages):
    def __init__(self, num_stages: int, before: _Following | None) -> None:
        self._events = [torch.cuda.Event() for _ in range(num_stages)]  # type: ignore[no-untyped-call]
        self._before = before

    def wait(self, stage: int) -> None:
        if self._before is not None:
            self._before._events[stage].wait()

    def written(self, stage: int) -> None:
        self._events[stage].record()

    def wait_for_end(self) -> None:
        """The last stage ends after every segment before."""
        self._events[-1].wait()


class Segments:
    """Runs the segments of a pass, each of so many stages. Without a GPU, one after the other."""

    def __init__(self, device: torch.device, num_stages: int) -> None:
        self._num_stages = num_stages
        count = MOST if device.type == "cuda" else 0
        self._streams = [torch.cuda.Stream(device) for _ in range(count)]  # type: ignore[no-untyped-call]

    def run(self, reads: Sequence[Callable[[Stages], None]]) -> None:
        """Calls each with its stages, at most MOST. The current stream goes on when all have ended."""
        if len(reads) == 1 or not self._streams:
            for read in reads:
                read(Stages())
            return
        begun = torch.cuda.current_stream().record_event()
        last: _Following | None = None
        for read, stream in zip(reads, self._streams[: len(reads)], strict=True):
            with torch.cuda.stream(stream):
                begun.wait()
                last = _Following(self._num_stages, last)
                read(last)
        if last is not None:
            last.wait_for_end()
