"""Speed of the kernels around the slot scan: `python -m benchmarks.mixer_kernels`, on a GPU.

Routing and the short convolution, forward and backward, at 32 rows of 1,024 tokens, 8 heads of 64 and 64 slots. Both
move bytes and compute little, so each time stands beside the share of the device's copy bandwidth that it reaches,
counting every input read once and every output written once. Each is first compared with the plain form in fp64, then
timed in its own tile and in the others of `VARIANTS` (tokens a program, warps). A table, then one line of JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from nsm_core.ops.routing.reference import routing_reference
from nsm_core.ops.short_conv.reference import short_conv_reference

BATCH, TOKENS, HEADS, HEAD_DIM, SLOTS, TOP_K, TAPS = 32, 1024, 8, 64, 64, 8, 4
TAPER, EPS = 0.1, 1e-6
VARIANTS = ((16, 2), (16, 4), (32, 2), (32, 4), (64, 4), (64, 8), (128, 8))
CHECKED_ROWS = 2  # in fp64, all rows would take the device's memory

Row = dict[str, Any]


def median_ms(work: Callable[[], object], repeats: int = 20) -> float:
    """Device time of one call, after three that are not counted."""
    times = []
    for repeat in range(repeats + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        if repeat >= 3:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def num_bytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def copy_bandwidth() -> float:
    """Bytes per second of a large copy on the device, read and written."""
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)
    return 2 * num_bytes(source) / (1e-3 * median_ms(lambda: target.copy_(source)))


def worst_error(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> float:
    """The largest relative error, by norm, among pairs of tensors."""
    pairs = zip(got, want, strict=True)
    return max(float((a.double() - b.detach()).norm() / b.detach().norm().clamp(min=1e-30)) for a, b in pairs)


class Routing:
    """Operands of the routing kernels."""

    def __init__(self) -> None:
        from nsm_core.ops.routing import kernel

        self.tiles, self.key = kernel.TILES, SLOTS
        self._kernel = kernel
        self.logits = torch.randn(BATCH, TOKENS, HEADS, SLOTS, device="cuda")
        self.strength = torch.randn(BATCH, TOKENS, HEADS, device="cuda")
        self.bias, self.timescale = torch.randn(2, HEADS, SLOTS, device="cuda").unbind(0)
        self.grad = torch.randn_like(self.logits)
        self.threshold = self.forward()[1]

    def forward(self, rows: int = BATCH) -> tuple[Tensor, ...]:
        logits, strength = self.logits[:rows], self.strength[:rows]
        return self._kernel.routing_forward(logits, strength, self.bias, self.timescale, None, TOP_K, TAPER)

    def backward(self, rows: int = BATCH) -> tuple[Tensor, ...]:
        given = (self.logits[:rows], self.strength[:rows], self.bias, self.timescale, None)
        return self._kernel.routing_backward(*given, self.threshold[:rows], self.grad[:rows], TOP_K, TAPER)

    def errors(self) -> tuple[float, float]:
        logits, strength = (x[:CHECKED_ROWS].double().requires_grad_() for x in (self.logits, self.strength))
        timescale = self.timescale.double().requires_grad_()
        want = routing_reference(
            logits=logits,
            strength=strength,
            selection_bias=self.bias.double(),
            log_timescale=timescale,
            top_k=TOP_K,
            taper=TAPER,
        )
        grads = torch.autograd.grad(want, (logits, strength, timescale), self.grad[:CHECKED_ROWS].double())
        forward = worst_error(self.forward(CHECKED_ROWS)[:1], (want.detach(),))
        return forward, worst_error(self.backward(CHECKED_ROWS), grads)

    def bytes(self) -> tuple[int, int]:
        forward = num_bytes(self.logits, self.logits, self.strength, self.threshold)
        return forward, num_bytes(self.logits, self.grad, self.logits, self.strength, self.strength, self.threshold)


class ShortConv:
    """Operands of the short convolution's kernels, in bf16."""

    def __init__(self) -> None:
        from nsm_core.ops.short_conv import kernel_backward, kernel_common, kernel_forward

        self.tiles, self.key = kernel_common.TILES, HEAD_DIM
        self._forward, self._backward = kernel_forward.short_conv_forward, kernel_backward.short_conv_backward
        width = 3 * HEADS * HEAD_DIM
        # a view into wider rows, as the projection makes it
        self.qkv = torch.randn(BATCH, TOKENS, width + HEADS * HEAD_DIM, device="cuda").bfloat16()[..., :width]
        self.weight = torch.randn(TAPS, width, device="cuda")
        self.tail = torch.randn(BATCH, TAPS - 1, width, device="cuda")
        self.reset = torch.rand(BATCH, TOKENS // 64, device="cuda") < 0.2
        self.grads = [torch.randn_like(out) for out in self.forward()]

    def forward(self, rows: int = BATCH) -> tuple[Tensor, ...]:
        given = (self.qkv[:rows], self.weight, self.tail[:rows], self.reset[:rows], None)
        return self._forward(*given, HEADS, EPS)

    def backward(self, rows: int = BATCH) -> tuple[Tensor, ...]:
        given = (self.qkv[:rows], self.weight, self.tail[:rows], self.reset[:rows], None)
        return self._backward(*given, *(grad[:rows] for grad in self.grads), HEADS, EPS)

    def errors(self) -> tuple[float, float]:
        rows = CHECKED_ROWS
        exact = (self.qkv[:rows], self.weight, self.tail[:rows])
        qkv, weight, tail = (x.double().requires_grad_() for x in exact)
        want = short_conv_reference(
            qkv=qkv, weight=weight, tail=tail, reset=self.reset[:rows], num_heads=HEADS, eps=EPS
        )
        grads = torch.autograd.grad(want, (qkv, weight, tail), [grad[:rows].double() for grad in self.grads])
        return worst_error(self.forward(rows), want), worst_error(self.backward(rows), grads)

    def bytes(self) -> tuple[int, int]:
        return 2 * num_bytes(self.qkv), 3 * num_bytes(self.qkv)


def rows_of(name: str, case: Routing | ShortConv, bandwidth: float) -> Iterator[Row]:
    own = case.tiles[case.key]
    for tile in (own, *(variant for variant in VARIANTS if variant != own)):
        case.tiles[case.key] = tile
        errors, floors = case.errors(), case.bytes()
        for direction, work, error, floor in zip(
            ("forward", "backward"), (case.forward, case.backward), errors, floors, strict=True
        ):
            ms = median_ms(work)
            share = floor / (1e-3 * ms) / bandwidth
            yield {"op": f"{name} {direction}", "tile": tile, "ms": ms, "share": share, "error": error}
    case.tiles[case.key] = own


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("benchmarks.mixer_kernels needs a GPU")
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s\n{'':24}{'tile':>10}{'ms':>10}{'share':>8}{'error':>10}")
    rows = []
    for name, case in (("routing", Routing()), ("short conv", ShortConv())):
        for row in rows_of(name, case, bandwidth):
            rows.append(row)
            tile = "{}x{}".format(*row["tile"])
            print(f"{row['op']:24}{tile:>10}{row['ms']:>10.4f}{row['share']:>8.2f}{row['error']:>10.1e}", flush=True)
    print(json.dumps({"device": torch.cuda.get_device_name(), "copy_bytes_per_s": bandwidth, "rows": rows}))


if __name__ == "__main__":
    main()
