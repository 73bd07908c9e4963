"""Names the parts of a model's work from outside: the model has no code for it.

Calls are wrapped while a measurement runs. Forward hooks of torch are not enough: they miss a decoding step, which
calls `step`, and the slot operators, which are functions.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from nsm_core.model import allocating, communicating, pulse
from nsm_core.model.attention import WindowAttention
from nsm_core.model.block import Block, SwiGlu
from nsm_core.model.nsm import NsmModel
from nsm_core.model.router import Router

# The parts, by the literature's names for them: docs/performance.md, "Where a model's time goes"
PARTS = (
    "router",  # which states a token writes to, and how strongly
    "slots",  # states change and are read
    "communication",  # states that exchange their contents
    "convolution",  # of a token with those just before it
    "attention",  # to tokens: layers W and A
    "mixer",  # the rest of a layer: norms, projections, residuals; layers of other kinds
    "feed_forward",
    "head",  # logits
    "model",  # the rest: embedding and the last norm
)
# Owner of the call, its name, and the part
CALLS: tuple[tuple[Any, str, str], ...] = (
    (Router, "forward", "router"),
    (pulse, "slot_scan", "slots"),
    (pulse, "slot_step", "slots"),
    (communicating, "slot_scan", "slots"),
    (allocating, "slot_scan_with_reads", "slots"),
    (allocating, "slot_step_with_reads", "slots"),
    (pulse.ReadBias, "forward", "slots"),
    (communicating.Communication, "forward", "communication"),
    (pulse.ShortConv, "forward", "convolution"),
    (pulse.ValueConv, "forward", "convolution"),
    (WindowAttention, "forward", "attention"),
    (WindowAttention, "step", "attention"),
    (SwiGlu, "forward", "feed_forward"),
    (Block, "forward", "mixer"),
    (Block, "step", "mixer"),
    (NsmModel, "logits", "head"),
    (NsmModel, "read", "model"),
    (NsmModel, "step", "model"),
    (NsmModel, "peek", "model"),
)


@contextlib.contextmanager
def observed_parts(around: Callable[[str], AbstractContextManager[object]]) -> Iterator[None]:
    """While open, `around(part)` is entered and left around each part of every model, on whatever thread.

    Executors other than the eager one do not pass there. One observation at a time.
    """
    with contextlib.ExitStack() as stack:
        for owner, name, part in CALLS:
            call = vars(owner)[name]
            setattr(owner, name, _wrapped(call, part, around))
            stack.callback(setattr, owner, name, call)
        yield


def _wrapped(
    call: Callable[..., Any], part: str, around: Callable[[str], AbstractContextManager[object]]
) -> Callable[..., Any]:
    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        with around(part):
            return call(*args, **kwargs)

    return run
