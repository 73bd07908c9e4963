"""What the kernels of the slot scan share: where a chunk lies, its log decays, its decay factors.

One program works on CHUNK tokens of one head. Rows of a batch, and sequences packed by cumulative lengths, are both one
list of chunks over the flattened tokens; only `locate_chunk` knows the difference.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsm_core.ops.slot_scan import chunked

CHUNK = tl.constexpr(chunked.CHUNK_LEN)
SUB_BLOCK = tl.constexpr(chunked.SUB_BLOCK)


@triton.jit
def locate_chunk(chunk, chunk_table, num_tokens, chunks_per_row, RAGGED: tl.constexpr):
    """First token of the chunk in the flattened batch (int64), its number of tokens, and its row."""
    if RAGGED:
        first = tl.load(chunk_table + 3 * chunk).to(tl.int64)
        length = tl.load(chunk_table + 3 * chunk + 1)
        row = tl.load(chunk_table + 3 * chunk + 2)
    else:
        row = chunk // chunks_per_row
        offset = (chunk % chunks_per_row) * CHUNK
        first = row.to(tl.int64) * num_tokens + offset
        length = num_tokens - offset
    return first, length, row


@triton.jit
def token_offsets(length, H, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Offsets [CHUNK,BLOCK] from the chunk's first element in a [tokens,H,WIDTH] tensor; the mask of real tokens."""
    token, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, BLOCK)[None, :]
    return token * (H * WIDTH) + column, (token < length) & (column < WIDTH)


@triton.jit
def load_tokens(x, first, length, h, H, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """[CHUNK,BLOCK] of a [tokens,H,WIDTH] tensor, zero past the chunk's tokens. `x` points to the first column."""
    offsets, mask = token_offsets(length, H, WIDTH, BLOCK)
    return tl.load(x + (first * H + h) * WIDTH + offsets, mask=mask, other=0.0)


@triton.jit
def store_tokens(x, values, first, length, h, H, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    offsets, mask = token_offsets(length, H, WIDTH, BLOCK)
    tl.store(x + (first * H + h) * WIDTH + offsets, values.to(x.dtype.element_ty), mask=mask)


@triton.jit
def load_active(active, row, active_stride, h, M: tl.constexpr, BLOCK: tl.constexpr):
    """[1,BLOCK] bool: slots that take part."""
    return tl.load(active + row * active_stride + h * M + tl.arange(0, BLOCK))[None, :] != 0


@triton.jit
def load_log_decay(
    log_decay,
    active,
    slot,
    first,
    length,
    row,
    active_stride,
    h,
    H,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVE: tl.constexpr,
):
    """[CHUNK,BLOCK] of the slots from `slot` on; padding and inactive slots neither decay nor write."""
    g = load_tokens(log_decay + slot, first, length, h, H, M, BLOCK)
    if ACTIVE:
        g = tl.where(load_active(active + slot, row, active_stride, h, M, BLOCK), g, 0.0)
    return g


@triton.jit
def write_weight(g):
    """1 - exp(g) for g <= 0, by its series near 0, where the difference would lose its digits."""
    series = 1.0 + g * (1.0 / 7.0)
    series = 1.0 + g * (1.0 / 6.0) * series
    series = 1.0 + g * (1.0 / 5.0) * series
    series = 1.0 + g * (1.0 / 4.0) * series
    series = 1.0 + g * (1.0 / 3.0) * series
    series = 1.0 + g * (1.0 / 2.0) * series
    return tl.where(g > -0.5, -g * series, 1.0 - tl.exp(g))


@triton.jit
def decay_factors(g):
    """Factors of exp(G_i - G_j), G the running sum of g; no exponent may pass 88.

    Within a sub-block: `left[i] * right[j]` around its middle. From the first sub-block to the second: the same times
    `far_left[i]` and `far_right[j]`, which move the reference to their border and are zero in the other sub-block: a
    product over the whole chunk needs no mask. From the chunk's start: `left[i] * from_start[i]`. The last three have
    one or two distinct rows.
    """
    token = tl.arange(0, CHUNK)[:, None]
    second = token >= SUB_BLOCK
    middle_0 = tl.sum(tl.where(token < SUB_BLOCK // 2, g, 0.0), axis=0)[None, :]
    border = tl.sum(tl.where(second, 0.0, g), axis=0)[None, :]
    middle_1 = tl.sum(tl.where(token < SUB_BLOCK + SUB_BLOCK // 2, g, 0.0), axis=0)[None, :]
    from_middle = tl.cumsum(g, axis=0) - tl.where(second, middle_1, middle_0)
    far_left = tl.where(second, tl.exp(middle_1 - border), 0.0)
    far_right = tl.where(second, 0.0, tl.exp(border - middle_0))
    from_start = tl.where(second, tl.exp(middle_1), tl.exp(middle_0))
    return tl.exp(from_middle), tl.exp(-from_middle), far_left, far_right, from_start


@triton.jit
def decay_to_end(g):
    """[CHUNK,M]: decay of a token's write by the chunk's end; summed from there: the small exponents are exact."""
    return tl.exp(tl.cumsum(g, axis=0, reverse=True) - g)


@triton.jit
def near_mask():
    """[CHUNK,CHUNK] bool: j is not after i and in the same sub-block."""
    i = tl.arange(0, CHUNK)[:, None]
    j = tl.arange(0, CHUNK)[None, :]
    return (i >= j) & ((i >= SUB_BLOCK) == (j >= SUB_BLOCK))


@triton.jit
def read_softmax(
    logits,
    scale,
    read_bias,
    active,
    first,
    length,
    row,
    active_stride,
    h,
    H,
    M: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVE: tl.constexpr,
):
    """Read weights [CHUNK,M] from the unscaled logits."""
    scaled = logits * tl.load(scale + h)
    if BIAS:
        scaled += load_tokens(read_bias, first, length, h, H, M, M)
    if ACTIVE:
        scaled = tl.where(load_active(active, row, active_stride, h, M, M), scaled, float("-inf"))
    read = tl.exp(scaled - tl.max(scaled, axis=1)[:, None])
    return read / tl.sum(read, axis=1)[:, None]


@triton.jit
def bank_offsets(chunk, h, H, M: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    """Offsets [BLOCK,K] of the key bank in [chunks,H,M,2K]; the value bank lies K further."""
    first = (chunk.to(tl.int64) * H + h) * (M * 2 * K)
    return first + tl.arange(0, BLOCK)[:, None] * (2 * K) + tl.arange(0, K)[None, :]


@triton.jit
def match_bank(x, y, bank, left, near_write, far_write, far_left, from_start, PRECISION: tl.constexpr):
    """[CHUNK,M]: x_i . S_i[m], where the bank S holds `bank` [M,K] at the chunk's start and is written with y."""
    scores = tl.dot(x, tl.trans(y), input_precision=PRECISION)
    result = from_start * tl.dot(x, tl.trans(bank), input_precision=PRECISION)
    result += far_left * tl.dot(scores.to(x.dtype), far_write, input_precision=PRECISION)
    scores = tl.where(near_mask(), scores, 0.0).to(x.dtype)
    return left * (result + tl.dot(scores, near_write, input_precision=PRECISION))


@triton.jit
def token_weights(near_read, far_read, near_write, far_write, PRECISION: tl.constexpr):
    """[CHUNK,CHUNK]: the share of token j's write in token i's read; `near_read` [CHUNK,M] is weights * left."""
    # where, not a product with the mask: a masked entry may be inf, and inf * 0 is NaN
    near = tl.dot(near_read, tl.trans(near_write), input_precision=PRECISION)
    near = tl.where(near_mask(), near, 0.0)
    return near + tl.dot(far_read, tl.trans(far_write), input_precision=PRECISION)
