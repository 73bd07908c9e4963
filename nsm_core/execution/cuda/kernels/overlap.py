"""Rows and ids of a step from the ids that the step before sampled on the device."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nsm_core.sampling.device import NUM_COLUMNS, POSITION_COLUMN


@triton.jit(do_not_specialize=["batch"])  # one program for all sizes: no compilation while requests wait
def _resolve(given_ptr, batch, sampled_ptr, pauses_ptr, vocab_size, rows_ptr, ids_ptr, no_row):
    index = tl.program_id(0)
    row = tl.load(given_ptr + index)
    token = tl.load(given_ptr + batch + index)
    source = tl.load(given_ptr + 2 * batch + index)
    is_unknown = source >= 0
    token = tl.load(sampled_ptr + source, mask=is_unknown, other=token)
    is_known = is_unknown & (token >= 0)
    pauses = tl.load(pauses_ptr + row * vocab_size + token, mask=is_known, other=0) != 0
    is_skipped = is_unknown & (pauses | (token < 0))
    row = tl.where(is_skipped, no_row, row)
    token = tl.where(is_skipped, 0, token)
    tl.store(rows_ptr + index, row)
    tl.store(ids_ptr + index, token)


def resolve_inputs(*, given: Tensor, sampled: Tensor, pauses: Tensor, rows: Tensor, ids: Tensor, no_row: int) -> None:
    """given [3,B] int64: rows of the pool, ids, sources. Writes rows and ids [B] int64.

    If a source is not negative, the id is sampled[source] (`sampled` [N] int64); the row becomes `no_row` if that id
    is negative, or pauses[row, id] (uint8 [rows of the pool, V]) is not 0. Without such sources `sampled` is not read.
    """
    batch = given.shape[1]
    _resolve[(batch,)](given, batch, sampled, pauses, pauses.shape[1], rows, ids, no_row, num_warps=1)


@triton.jit(do_not_specialize=["stride"])
def _end_round(
    rows_ptr,
    ids_ptr,
    chosen_ptr,
    params_ptr,
    left_ptr,
    round_ptr,
    rounds_ptr,
    stride,
    last_ptr,
    pauses_ptr,
    vocab_size,
    no_row,
    skipped,
    PARAMS: tl.constexpr,
    POSITION: tl.constexpr,
):
    index = tl.program_id(0)
    row = tl.load(rows_ptr + index)
    is_live = row >= 0
    token = tl.where(is_live, tl.load(chosen_ptr + index), skipped)
    number = tl.load(round_ptr + index)
    left = tl.load(left_ptr + index) - 1
    position = tl.load(params_ptr + index * PARAMS + POSITION)
    is_known = is_live & (token >= 0)
    pauses = tl.load(pauses_ptr + row * vocab_size + token, mask=is_known, other=0) != 0
    goes_on = is_known & (pauses == 0) & (left > 0)
    tl.debug_barrier()  # every thread has read before one of them writes
    tl.store(rounds_ptr + number * stride + index, token)
    tl.store(last_ptr + index, token)
    tl.store(round_ptr + index, number + 1)
    tl.store(left_ptr + index, left)
    tl.store(params_ptr + index * PARAMS + POSITION, position + 1)
    tl.store(rows_ptr + index, tl.where(goes_on, row, no_row))
    tl.store(ids_ptr + index, tl.where(goes_on, token, 0))


def end_round(
    *,
    rows: Tensor,
    ids: Tensor,
    chosen: Tensor,
    params: Tensor,
    left: Tensor,
    number: Tensor,
    rounds: Tensor,
    last: Tensor,
    pauses: Tensor,
    no_row: int,
    skipped: int,
) -> None:
    """After a round of a launch: notes the tokens `chosen` [B] int64, and leaves what the next round reads.

    rows, ids [B] int64: of this round and then of the next one, which a row skips (`no_row`) after a token that is
    negative or one of its `pauses` (uint8 [rows of the pool, V]), and when `left` [B] has come down to 0. params
    [B, 7]: positions move on. rounds [n, >= B], last [B], number [B] int64: the token, or `skipped`, goes to row
    number[i] of `rounds`, which moves on, and to `last`.
    """
    _end_round[(rows.shape[0],)](
        rows,
        ids,
        chosen,
        params,
        left,
        number,
        rounds,
        rounds.stride(0),
        last,
        pauses,
        pauses.shape[1],
        no_row,
        skipped,
        PARAMS=NUM_COLUMNS,
        POSITION=POSITION_COLUMN,
        num_warps=1,
    )
