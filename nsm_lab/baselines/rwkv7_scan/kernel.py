"""The state scan of RWKV-7 on a GPU: a program walks some columns of one head's state, token by token.

With S [K,V], rows by key: S <- diag(w) S - b (a^T S) + k v^T, then y = S^T r. No column needs another, so they are
shared out. The backward pass walks back from the states that the forward pass left every CHUNK tokens, undoing one
token at a time: w is at least exp(-exp(-0.5)) = 0.545, so CHUNK divisions lose four digits at worst.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 16
FLAGGED = 64  # tokens for each flag of `reset`
COLUMNS = 32  # of a head's state, to a program
NUM_WARPS = {32: 2, 64: 2, 128: 4, 256: 8}  # by the width of a head


@triton.jit
def _forward(
    r, w, k, v, a, b, start, reset, y, found, states, last, num_tokens,
    H: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, FLAGGED: tl.constexpr,
    RESET: tl.constexpr,
):  # fmt: skip
    """y and found = a^T S, both [B,T,H,K]; states [B H, T / CHUNK, K, K]: before each chunk. start and last [B,H,K,K].
    reset [B, T / FLAGGED]: the state is zero there. The next token is read while this one is computed."""
    row = tl.program_id(0).to(tl.int64)
    keys, values = tl.arange(0, K), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here = (row // H) * num_tokens * H * K + (row % H) * K
    cells = keys[:, None] * K + values[None, :]
    held = tl.load(start + row * K * K + cells)
    r_t, w_t, k_t = tl.load(r + here + keys), tl.load(w + here + keys), tl.load(k + here + keys)
    a_t, b_t, v_t = tl.load(a + here + keys), tl.load(b + here + keys), tl.load(v + here + values)
    for t in range(num_tokens):
        if t % CHUNK == 0:
            if RESET:
                is_start = (tl.load(reset + (row // H) * (num_tokens // FLAGGED) + t // FLAGGED) != 0) & (
                    t % FLAGGED == 0
                )
                held = tl.where(is_start, 0.0, held)
            tl.store(states + (row * (num_tokens // CHUNK) + t // CHUNK) * K * K + cells, held)
        after = here + H * K
        of_keys, of_values = (t + 1 < num_tokens) & (keys < K), (t + 1 < num_tokens) & (values < K)
        r_n, w_n = tl.load(r + after + keys, mask=of_keys), tl.load(w + after + keys, mask=of_keys)
        k_n, a_n = tl.load(k + after + keys, mask=of_keys), tl.load(a + after + keys, mask=of_keys)
        b_n, v_n = tl.load(b + after + keys, mask=of_keys), tl.load(v + after + values, mask=of_values)
        seen = tl.sum(held * a_t[:, None], axis=0)
        held = held * w_t[:, None] - b_t[:, None] * seen[None, :] + k_t[:, None] * v_t[None, :]
        tl.store(found + here + values, seen)
        tl.store(y + here + values, tl.sum(held * r_t[:, None], axis=0))
        r_t, w_t, k_t, a_t, b_t, v_t, here = r_n, w_n, k_n, a_n, b_n, v_n, after
    tl.store(last + row * K * K + cells, held)


@triton.jit
def _backward(
    r, w, k, v, a, b, reset, d_y, d_last, found, states, d_r, d_w, d_k, d_v, d_a, d_b, d_start, num_tokens, size,
    H: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, FLAGGED: tl.constexpr,
    RESET: tl.constexpr,
):  # fmt: skip
    """d_v [B,T,H,K], d_start [B,H,K,K]; the other gradients [programs of a head, B,T,H,K], of which each program writes
    its part."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    keys, values = tl.arange(0, K), part * COLUMNS + tl.arange(0, COLUMNS)
    first = (row // H) * num_tokens * H * K + (row % H) * K
    own = part.to(tl.int64) * size
    cells = keys[:, None] * K + values[None, :]
    grad = tl.load(d_last + row * K * K + cells)
    for chunk in range(num_tokens // CHUNK - 1, -1, -1):
        held = tl.load(states + (row * (num_tokens // CHUNK) + chunk) * K * K + cells)
        for step in range(CHUNK):  # to the end of the chunk
            here = first + (chunk * CHUNK + step) * H * K
            w_t, k_t, b_t = tl.load(w + here + keys), tl.load(k + here + keys), tl.load(b + here + keys)
            v_t, seen = tl.load(v + here + values), tl.load(found + here + values)
            held = held * w_t[:, None] - b_t[:, None] * seen[None, :] + k_t[:, None] * v_t[None, :]
        for back in range(CHUNK):
            here = first + (chunk * CHUNK + CHUNK - 1 - back) * H * K
            r_t, w_t, k_t = tl.load(r + here + keys), tl.load(w + here + keys), tl.load(k + here + keys)
            a_t, b_t, v_t = tl.load(a + here + keys), tl.load(b + here + keys), tl.load(v + here + values)
            seen, d_out = tl.load(found + here + values), tl.load(d_y + here + values)
            tl.store(d_r + own + here + keys, tl.sum(held * d_out[None, :], axis=1))
            grad += r_t[:, None] * d_out[None, :]
            held = (held + b_t[:, None] * seen[None, :] - k_t[:, None] * v_t[None, :]) / w_t[:, None]
            tl.store(d_v + here + values, tl.sum(grad * k_t[:, None], axis=0))
            tl.store(d_k + own + here + keys, tl.sum(grad * v_t[None, :], axis=1))
            tl.store(d_b + own + here + keys, -tl.sum(grad * seen[None, :], axis=1))
            tl.store(d_w + own + here + keys, tl.sum(grad * held, axis=1))
            d_seen = -tl.sum(grad * b_t[:, None], axis=0)
            tl.store(d_a + own + here + keys, tl.sum(held * d_seen[None, :], axis=1))
            grad = grad * w_t[:, None] + a_t[:, None] * d_seen[None, :]
        if RESET:
            at = chunk * CHUNK
            is_start = (tl.load(reset + (row // H) * (num_tokens // FLAGGED) + at // FLAGGED) != 0) & (
                at % FLAGGED == 0
            )
            grad = tl.where(is_start, 0.0, grad)
    tl.store(d_start + row * K * K + cells, grad)


def run_forward(inputs: list[Tensor], start: Tensor, reset: Tensor | None) -> list[Tensor]:
    """inputs: r, w, k, v, a, b, each [B,T,H,K] fp32 and contiguous; start [B,H,K,K]; reset [B, T / FLAGGED] uint8.

    Returns y, found, states and the state after the last token.
    """
    batch, num_tokens, heads, width = inputs[0].shape
    y, found, last = torch.empty_like(inputs[0]), torch.empty_like(inputs[0]), torch.empty_like(start)
    states = start.new_empty(batch * heads, num_tokens // CHUNK, width, width)
    with torch.cuda.device_of(y):  # kernels start on the current device, which need not be the tensors'
        _forward[batch * heads, width // COLUMNS](
            *inputs, start, reset, y, found, states, last, num_tokens, **_constants(heads, width, reset)
        )
    return [y, found, states, last]


def run_backward(
    inputs: list[Tensor], reset: Tensor | None, d_y: Tensor, d_last: Tensor, found: Tensor, states: Tensor
) -> list[Tensor]:
    """Gradients of `inputs`, in their order, and of the start."""
    batch, num_tokens, heads, width = inputs[0].shape
    parts = width // COLUMNS
    d_r, d_w, d_k, d_a, d_b = (d_y.new_empty(parts, *d_y.shape) for _ in range(5))
    d_v, d_start = torch.empty_like(d_y), torch.empty_like(d_last)
    with torch.cuda.device_of(d_y):
        _backward[batch * heads, parts](
            *inputs, reset, d_y, d_last, found, states, d_r, d_w, d_k, d_v, d_a, d_b, d_start, num_tokens, d_y.numel(),
            **_constants(heads, width, reset),
        )  # fmt: skip
    return [d_r.sum(0), d_w.sum(0), d_k.sum(0), d_v, d_a.sum(0), d_b.sum(0), d_start]


def _constants(heads: int, width: int, reset: Tensor | None) -> dict[str, object]:
    sizes = {"H": heads, "K": width, "COLUMNS": COLUMNS, "CHUNK": CHUNK, "FLAGGED": FLAGGED}
    return {**sizes, "RESET": reset is not None, "num_warps": NUM_WARPS[width]}
