"""What a session keeps of a turn: the state and the log that agree with the visible text."""

from __future__ import annotations

from collections import Counter

from nsm_core.engine.output import StopMatch
from nsm_core.engine.request import EndState
from nsm_core.engine.runner import Runner
from nsm_core.engine.sequence import RunningSequence
from nsm_core.tokenizer import Tokenizer


def make_end_state(
    runner: Runner, sequence: RunningSequence, slot: int, stop: StopMatch | None, tokenizer: Tokenizer
) -> EndState:
    """`stop` is None when max_tokens ended the turn. May change the state in `slot`: it is the turn's last use of it.

    The state is that of one run over the log's ids, whatever ended the turn: tokens of a stop string that were fed are
    taken back, and a token that the stop string cut in the middle is replaced by the ids of its visible bytes.
    """
    num_sampled = len(sequence.sampled)
    num_whole = num_sampled if stop is None else num_sampled - stop.num_dropped
    tail = tokenizer.encode_bytes(stop.tail) if stop is not None and stop.tail else []
    kept = [*sequence.sampled[:num_whole], *tail]
    if stop is not None:
        runner.take_back(slot, sequence)  # drafts may have been read past the stop
    num_fed = sequence.num_fed
    earlier = None
    if num_whole < num_fed:
        point = sequence.rewind_points.latest(num_kept=num_whole)
        num_fed, earlier = point.num_fed, point.state
    unfed = kept[num_fed:]
    runner.feed(slot, unfed[:-1], since=earlier)
    pending = unfed[-1] if unfed else None
    new_ids = (*sequence.request.prompt_ids, *kept)
    return EndState(
        state=runner.slots.pool(slot).pack(slot),
        position=sequence.resumed_position + len(new_ids) - (pending is not None),
        pending=pending,
        new_ids=new_ids,
        generated_counts=dict(Counter(sequence.resumed_counts) + Counter(kept)),
    )
