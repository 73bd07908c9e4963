"""Where a prompt must be cut so that it is read with the bits that its parts had when they were first read or sampled.

For executors whose prompts and single tokens have kernels of their own: what was sampled is read one by one again, and
what was read together is cut at multiples of the executor's unit from its own start. Plain Python.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def cuts_of(
    length: int, sampled_at: Sequence[tuple[int, int]], *, wanted: Iterable[int] = (), unit: int
) -> tuple[int, ...]:
    """Rising ends of the pieces of a text of `length` tokens, at which no call may go on.

    `sampled_at`: [start, stop) of tokens that were sampled, rising; an empty one parts two texts. `wanted`: further
    cuts. `unit`: see Executor.prompt_unit; with 1 no cut but those wanted makes a difference.
    """
    cuts = set(wanted)
    if unit > 1:
        read_from = 0
        for start, stop in (*sampled_at, (length, length)):
            cuts.update(range(start, stop + 1))
            # a call of one token is a step, whatever it follows: so a last one beyond whole units always is
            if start - read_from > 1 and (start - read_from) % unit == 1:
                cuts.add(start - 1)
            read_from = stop
    return tuple(sorted(cut for cut in cuts if 0 < cut <= length))
