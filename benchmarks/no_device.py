"""A GPU that computes nothing, where there is none: what is left of an executor for GPUs is its Python.

Kernels and recorded graphs are counted and left out, and each token that is chosen is TOKEN. A recorded graph may take
time all the same: whoever waits for tokens sleeps until the graphs before them would have ended. So figures lack what a
launch costs in the driver and in the compiler's launcher.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from nsm_core.execution.cuda import executor, prompt_reader, rounds
from nsm_core.execution.cuda.executor import CudaExecutor
from nsm_core.sampling import device, sampler

TOKEN = 7


@dataclasses.dataclass(slots=True)
class Clock:
    """Milliseconds that graphs take: a step or a round, and a prompt of so many tokens, padding too. `free_at`: when
    the last one ends, in seconds.
    """

    step_ms: float = 0.0
    prompt_ms: float = 0.0
    token_ms: float = 0.0
    free_at: float = 0.0

    def take(self, work: Any) -> None:
        is_prompt = getattr(work, "func", work).__name__ == "_read_rows"
        ms = self.prompt_ms + self.token_ms * work.args[0].ids.numel() if is_prompt else self.step_ms
        self.free_at = max(self.free_at, time.perf_counter()) + ms / 1e3


class _Nothing:
    """An event or a stream."""

    def record(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def query(self) -> bool:
        return True


@contextlib.contextmanager
def no_device(clock: Clock | None = None) -> Iterator[Counter[str]]:
    """Meanwhile executors for GPUs can be made of models on a CPU. Gives the number of launches, by their names."""
    launches, on_clock = Counter[str](), clock or Clock()
    make_tokens, wait = device.PendingTokens.__init__, device.PendingTokens.wait

    class Graph:
        """Named by what it records."""

        def __init__(self, work: Callable[[], None]) -> None:
            self._work = work
            self._name = f"graph of {getattr(work, 'func', work).__qualname__}"

        def replay(self) -> None:
            launches[self._name] += 1
            on_clock.take(self._work)

    def launch(self: Any, *args: object, **options: object) -> None:
        launches[self.fn.__name__] += 1

    def record(work: Callable[[], None], on: torch.device, *, memory: object = None) -> Graph:
        return Graph(work)

    def choose(logits: Tensor, params: Tensor | None, words: Tensor | None = None) -> Tensor:
        launches["choose_tokens"] += 1
        return torch.full((len(logits),), TOKEN)

    def make(self: Any, *args: Any) -> None:
        make_tokens(self, *args)
        self.ends_at = on_clock.free_at

    def wait_until(self: Any) -> Any:
        time.sleep(max(0.0, self.ends_at - time.perf_counter()))
        return wait(self)

    patches = [
        mock.patch.object(device.PendingTokens, "__init__", make),
        mock.patch.object(device.PendingTokens, "wait", wait_until),
        *(mock.patch.object(kind, "run", launch) for kind in (JITFunction, InterpretedFunction)),
        *(mock.patch.object(module, "record", record) for module in (executor, prompt_reader, rounds)),
        *(mock.patch.object(module, "choose_on_device", choose) for module in (device, rounds)),
        mock.patch.object(sampler, "runs_kernels", return_value=True),
        mock.patch.object(torch.cuda, "graph_pool_handle", object),
        mock.patch.object(torch.cuda, "Event", _Nothing),
        mock.patch.object(torch.cuda, "device", return_value=contextlib.nullcontext()),
        mock.patch.object(torch.cuda, "current_stream", return_value=_Nothing()),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield launches


def fill_rounds(made: CudaExecutor) -> None:
    """What launches of several tokens would have left on the device."""
    if made.overlap is not None and made.overlap.rounds is not None:
        for tokens in (made.overlap.rounds._rounds, made.overlap.rounds._last):
            tokens.fill_(TOKEN)
