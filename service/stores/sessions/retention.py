"""Which older snapshots a session keeps: a few, at distances from its head that grow.

To go back to a token is to start from the nearest kept snapshot before it and to read the rest again. Those close to
the head matter most: people go back a turn or two, and rarely a thousand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

MAX_KEPT = 8  # the stores have room for so many; NSM_KEPT_SNAPSHOTS may not ask for more
SPARED_TOKENS = 256  # one that saves the reading of fewer is not worth its bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KeptSnapshot:
    """An older snapshot that is still there: the one of `version`, after `position` fed tokens."""

    version: int
    position: int
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """What a commit does with older snapshots: those of the versions `stay` stay, all others go, and `joins` is added.

    `snapshot`: the bytes of `joins`, encoded; all are of this session's own log and below the new head.
    """

    stay: tuple[int, ...] = ()
    joins: KeptSnapshot | None = None
    snapshot: bytes = b""


KEEP_NONE = Keeping()


def plan_kept(
    kept: Sequence[KeptSnapshot], newest: KeptSnapshot | None, *, position: int, max_kept: int
) -> tuple[int, ...]:
    """The versions to keep when a head comes to `position` tokens, oldest first.

    `kept`: what is there, oldest first; `newest`: what was the newest snapshot until now. While there are more than
    `max_kept`, and while one spares less than SPARED_TOKENS, the one goes that leaves the smallest gap behind for its
    distance from the head. So, as long as only commits come, a gap between neighbours (the start and the head are two)
    is at most one turn long, or SPARED_TOKENS, or `gap_factor` times the distance of its later end plus SPARED_TOKENS.
    """
    candidates = [one for one in (*kept, newest) if one is not None and one.position < position]
    while candidates:
        places = (0, *(snapshot.position for snapshot in candidates), position)
        gaps = [after - before for before, after in zip(places, places[2:], strict=False)]
        if len(candidates) <= max_kept and min(gaps) > SPARED_TOKENS:
            break
        costs = [gap / (position - after + SPARED_TOKENS) for gap, after in zip(gaps, places[2:], strict=True)]
        candidates.pop(costs.index(min(costs)))
    return tuple(snapshot.version for snapshot in candidates)


def gap_factor(position: int, max_kept: int) -> float:
    """The factor of `plan_kept` for a head at `position`."""
    # Were each of the max_kept + 1 candidates to leave a larger gap, distances from the head, counted from the newest
    # candidate, would grow by more than 1 + factor with every second one, and so beyond the whole log.
    return float((position / SPARED_TOKENS + 1) ** (1 / ((max_kept + 1) // 2)) - 1)
