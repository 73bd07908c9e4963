"""A location in a token log: the end of a turn, or any token."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from nsm_core.errors import InvalidRequest
from service.stores.sessions.base import LogMark, SessionHead

MAX_SHOWN_VERSIONS = 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogLocation:
    """The end of the turn that made `version` (0: the log's start), or after `position` tokens: one of them is None.

    `prefix`: of the two fields in the client's body; `field`: the name of the one that is there, if it is another.
    """

    version: int | None
    position: int | None
    prefix: str = ""
    field: str | None = None

    def num_log_tokens(self, head: SessionHead, marks: Sequence[LogMark]) -> int:
        """How many tokens of the log lie before it. Raises InvalidRequest."""
        if self.position is not None:
            return self._checked_position(head, self.position)
        ends = {0: 0} | {mark.version: mark.num_log_tokens for mark in marks}
        if self.version not in ends:
            name = self.field or f"{self.prefix}version"
            last = ", ".join(str(version) for version in list(ends)[-MAX_SHOWN_VERSIONS:])
            raise InvalidRequest(
                f"{name} must be a version that the session's log still has (the last are {last}), got {self.version}",
                param=name,
            )
        return ends[self.version]

    def _checked_position(self, head: SessionHead, position: int) -> int:
        if not 0 <= position <= head.num_log_tokens:
            name = f"{self.prefix}position"
            raise InvalidRequest(f"{name} must be in [0, {head.num_log_tokens}], got {position}", param=name)
        return position


def marks_up_to(marks: Sequence[LogMark], num_log_tokens: int) -> tuple[LogMark, ...]:
    """The marks of the first `num_log_tokens` of a log. A turn that they cut gets a mark at the cut, with the number of
    its sampled tokens that stay.
    """
    whole = tuple(mark for mark in marks if mark.num_log_tokens <= num_log_tokens)
    start = whole[-1].num_log_tokens if whole else 0
    cut = next((mark for mark in marks if mark.num_log_tokens > num_log_tokens), None)
    if cut is None or start == num_log_tokens:
        return whole
    first_sampled = max(start, cut.num_log_tokens - cut.num_sampled)
    num_sampled = max(0, num_log_tokens - first_sampled)
    return (*whole, dataclasses.replace(cut, num_log_tokens=num_log_tokens, num_sampled=num_sampled))
