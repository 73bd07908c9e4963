"""Which older snapshots a session retains: a few, at distances from its head that grow.

A rewind starts from the nearest retained snapshot before its target and reads the rest again. Those close to the head
matter most: people go back a turn or two, and rarely a thousand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

MAX_RETAINED = 8  # the stores have room for so many; NSM_RETAINED_SNAPSHOTS may not ask for more
MIN_GAP_TOKENS = 256  # a snapshot that saves the reading of fewer tokens is not worth its bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RetainedSnapshot:
    """An older snapshot in the store: the one of `version`, after `position` fed tokens."""

    version: int
    position: int
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """The fate of older snapshots when a newer one is stored: those of the versions `keep` stay, all others go.

    The newest until now is one of them.
    """

    keep: tuple[int, ...] = ()


NO_RETENTION = Retention()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shedding:
    """Sessions without a turn for `unused_for_s` seconds lose their older snapshots; at most `limit` sessions.

    `of_model`: None, or fingerprint and numerics class of a model: its sessions lose the newest snapshot as well, and
    others are left alone.
    """

    unused_for_s: float
    limit: int
    of_model: tuple[str, str] | None = None


def plan_retention(
    retained: Sequence[RetainedSnapshot], newest: RetainedSnapshot | None, *, position: int, max_retained: int
) -> tuple[int, ...]:
    """The versions to retain when a head moves to `position` tokens, oldest first.

    `retained`: what the session has, oldest first; `newest`: its newest snapshot until now. While there are more than
    `max_retained`, or one that saves fewer than MIN_GAP_TOKENS, drop the one that leaves the smallest gap for its
    distance from the head. So, as long as only commits come, a gap between neighbours (the start and the head are two)
    is at most one turn long, or MIN_GAP_TOKENS, or in proportion to the distance of its later end plus MIN_GAP_TOKENS,
    by a factor that the tests derive.
    """
    candidates = [one for one in (*retained, newest) if one is not None and one.position < position]
    while candidates:
        positions = (0, *(snapshot.position for snapshot in candidates), position)
        gaps = [after - before for before, after in zip(positions, positions[2:], strict=False)]
        if len(candidates) <= max_retained and min(gaps) > MIN_GAP_TOKENS:
            break
        costs = [gap / (position - after + MIN_GAP_TOKENS) for gap, after in zip(gaps, positions[2:], strict=True)]
        candidates.pop(costs.index(min(costs)))
    return tuple(snapshot.version for snapshot in candidates)
