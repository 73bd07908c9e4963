"""What a session keeps of a turn: the state and the log that agree with the visible text."""

from __future__ import annotations

from collections import Counter

from nsm_core.engine.output import StopMatch
from nsm_core.engine.request import EndState
from nsm_core.engine.runner import Runner
from nsm_core.engine.sequence import RunningSequence
from nsm_core.state.spec import State
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
    point = sequence.rewind_points.latest(num_kept=num_whole) if num_whole < num_sampled - 1 else None
    num_fed = num_sampled - 1 if point is None else point.num_fed  # the token sampled last is never fed
    pending = kept[-1] if len(kept) > num_fed else None
    num_wanted = len(kept) - (pending is not None)
    num_read = sequence.num_fed  # fewer where drafts were taken back
    earlier: State | None = None
    if point is not None and num_read > min(num_whole, num_wanted):
        num_read, earlier = point.num_read, point.state
    unread = kept[num_read:num_wanted]
    runner.feed(slot, unread, since=earlier)
    new_ids = (*sequence.request.prompt_ids, *kept)
    return EndState(
        state=runner.pack(slot, is_at_rest=not unread and earlier is None),
        position=sequence.resumed_position + len(new_ids) - (pending is not None),
        pending=pending,
        new_ids=new_ids,
        generated_counts=dict(Counter(sequence.resumed_counts) + Counter(kept)),
    )
