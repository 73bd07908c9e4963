"""Times and memory of one model: whole training steps, prefill, decode."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.family.counting import LiveBytes
from benchmarks.family.models import VOCABULARY, Size, build, sees_everything
from nsm_core.model.nsm import NsmModel

MIN_REPEATS, MAX_REPEATS = 3, 30
FOLLOWED_TOKENS = 1024
FIRST_CALL_S = 5.0  # what a first call may take on top: it loads libraries and may compile kernels
PREFILL_PIECE = 8192  # tokens in one call of a model whose state has a fixed size
Row = dict[str, Any]


class TooSlow(Exception):
    """A first call took so long that the repeats would pass the cell's limit."""


class Timer:
    """Repeats work within a time limit; device time on a GPU, wall time elsewhere."""

    def __init__(self, device: torch.device, repeat_s: float, limit_s: float) -> None:
        self.device, self._repeat_s, self._limit_s = device, repeat_s, limit_s

    def measure(self, *parts: Callable[[], object]) -> list[list[float]]:
        """Milliseconds of each part in each repeat, the parts one after the other. Raises TooSlow."""
        took = self._wall_s(parts)
        if took < self._limit_s + FIRST_CALL_S:
            took = self._wall_s(parts)
        if took * MIN_REPEATS > self._limit_s:
            raise TooSlow(f"one call takes {took:.1f} s, {MIN_REPEATS} of them more than {self._limit_s:g} s")
        times: list[list[float]] = []
        started = time.monotonic()
        while len(times) < MIN_REPEATS or (len(times) < MAX_REPEATS and time.monotonic() - started < self._repeat_s):
            times.append(self._once(parts))
        return [list(part) for part in zip(*times, strict=True)]

    def _wall_s(self, parts: tuple[Callable[[], object], ...]) -> float:
        started = time.monotonic()
        self._once(parts)
        return time.monotonic() - started

    def _once(self, parts: tuple[Callable[[], object], ...]) -> list[float]:
        if self.device.type != "cuda":
            marks = [time.perf_counter()]
            for part in parts:
                part()
                marks.append(time.perf_counter())
            return [1e3 * (end - start) for start, end in itertools.pairwise(marks)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(parts) + 1)]
        torch.cuda.synchronize()
        events[0].record()
        for part, event in zip(parts, events[1:], strict=True):
            part()
            event.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in itertools.pairwise(events)]


def spread(times: list[float]) -> Row:
    """Median and quartiles in milliseconds."""
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return {"ms": middle, "ms_q1": low, "ms_q3": high, "repeats": len(times)}


def added_bytes(work: Callable[[], object], device: torch.device) -> int:
    """The most memory that `work` needs at once on top of what is there; on a CPU that of the tensors it makes."""
    if device.type != "cuda":
        live = LiveBytes()
        with live:
            work()
        return live.peak
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    return max(0, torch.cuda.max_memory_allocated() - before)


def autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def random_ids(*shape: int, device: torch.device) -> Tensor:
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(0)).to(device)


def loss_of(model: NsmModel, ids: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats of rows that start fresh."""
    with autocast(ids.device):
        hidden, _ = model.read(ids, model.initial_state(len(ids)), is_fresh=True)
        return F.cross_entropy(model.logits(hidden).flatten(0, 1), targets.flatten())


def time_training(name: str, size: Size, rows: int, num_tokens: int, timer: Timer) -> Row:
    """Forward and backward of `rows` rows of `num_tokens`: each by itself, both, and memory on top of the weights."""
    model = build(name, size, num_tokens, timer.device).train()
    ids = random_ids(rows, num_tokens, device=timer.device)
    loss = torch.zeros(())

    def forward() -> None:
        nonlocal loss
        model.zero_grad(set_to_none=True)
        loss = loss_of(model, ids, ids)

    def backward() -> None:
        loss.backward()

    ahead, back = timer.measure(forward, backward)
    both = spread([sum(pair) for pair in zip(ahead, back, strict=True)])
    row = {"forward": spread(ahead), "backward": spread(back), "both": both}
    if _has_cheap_memory(timer.device, num_tokens):
        model.zero_grad(set_to_none=True)
        row["peak_bytes"] = added_bytes(lambda: (forward(), backward()), timer.device)
    return row | {"tokens": rows * num_tokens, "tok_per_s": 1e3 * rows * num_tokens / both["ms"]}


def time_prefill(name: str, size: Size, num_tokens: int, timer: Timer) -> Row:
    """Reading one prompt: the logits of its last token and the state; fixed-size states read in pieces."""
    model = build(name, size, num_tokens, timer.device).eval()
    is_whole = sees_everything(model.config)
    pieces = torch.split(random_ids(1, num_tokens, device=timer.device), num_tokens if is_whole else PREFILL_PIECE, 1)

    @torch.inference_mode()
    def read() -> None:
        with autocast(timer.device):
            state = model.initial_state(1)
            for piece in pieces:
                hidden, state = model.read(piece, state, is_fresh=is_whole)
            model.logits(hidden[:, -1])

    (times,) = timer.measure(read)
    row = spread(times) | {"state_bytes": model.state_spec.num_bytes}
    if _has_cheap_memory(timer.device, num_tokens):
        row["peak_bytes"] = added_bytes(read, timer.device)
    return row | {"tokens": num_tokens, "tok_per_s": 1e3 * num_tokens / row["ms"]}


def _has_cheap_memory(device: torch.device, num_tokens: int) -> bool:
    """On a CPU each tensor is followed by its own, which takes as long as there are many."""
    return device.type == "cuda" or num_tokens <= FOLLOWED_TOKENS


def time_decode(name: str, size: Size, rows: int, context: int, timer: Timer) -> Row:
    """One more token for each of `rows` conversations that are `context` tokens long."""
    model = build(name, size, context, timer.device).eval()
    ids, state = random_ids(rows, device=timer.device), model.initial_state(rows)
    state["position"] += context

    @torch.inference_mode()
    def step() -> None:
        nonlocal state
        with autocast(timer.device):
            hidden, state = model.step(ids, state)
            model.logits(hidden)

    (times,) = timer.measure(step)
    return spread(times) | {"tokens": rows, "tok_per_s": 1e3 * rows / statistics.median(times)}
