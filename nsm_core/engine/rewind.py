"""Earlier states of a running sequence, kept while a stop string may yet take tokens back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from nsm_core.state.spec import State

# A second copy is made only when the first is this many tokens old: copies are rare, and few tokens are read again.
MIN_SPACING_TOKENS = 64


@dataclasses.dataclass(frozen=True, slots=True)
class RewindPoint:
    """A state to go back to: the one after `num_fed` sampled tokens were fed on top of the prompt.

    `state` [1, *shape] has read `num_read` of them, fewer where drafts of tokens were taken back.
    """

    num_fed: int
    num_read: int
    state: State


class RewindPoints:
    """At most two copies: the one to go back to, and a younger one that takes its place when the held text moves on."""

    def __init__(self) -> None:
        self._points: list[RewindPoint] = []

    def update(self, *, num_fed: int, num_read: int, holding_since: int | None, copy: Callable[[], State]) -> None:
        """Called after each sampled token. `holding_since`: index (from 1) of the first token that may be taken back,
        None when none can; `copy` gives the state now, which has read `num_read` of `num_fed` sampled tokens.
        """
        if holding_since is None:
            self._points.clear()
            return
        if len(self._points) == 2 and self._points[1].num_fed < holding_since:
            del self._points[0]
        is_old = len(self._points) == 1 and num_fed - self._points[0].num_fed >= MIN_SPACING_TOKENS
        if is_old or not self._points:
            self._points.append(RewindPoint(num_fed, num_read, copy()))

    def is_copy_near(self, *, num_fed: int) -> bool:
        """Whether `update` may ask for a second copy within a few tokens."""
        return len(self._points) == 1 and num_fed - self._points[0].num_fed >= MIN_SPACING_TOKENS - 3

    def latest(self, *, num_kept: int) -> RewindPoint:
        """The youngest point with at most `num_kept` sampled tokens fed."""
        return next(point for point in reversed(self._points) if point.num_fed <= num_kept)
