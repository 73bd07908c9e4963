"""The rows and ids of a step, from ids that the step before it sampled on the device."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

NUM_COLUMNS = 3  # row, id, source; the ids that end the row stand behind them


@triton.jit
def _follow(given_ptr, stride, sampled_ptr, rows_ptr, ids_ptr, no_row, COLUMNS: tl.constexpr, STOPS: tl.constexpr):
    index = tl.program_id(0)
    given_ptr += index * stride
    row = tl.load(given_ptr)
    token = tl.load(given_ptr + 1)
    source = tl.load(given_ptr + 2)
    if sampled_ptr is not None:
        is_unknown = source >= 0
        token = tl.load(sampled_ptr + source, mask=is_unknown, other=token)
        stops = tl.load(given_ptr + COLUMNS + tl.arange(0, STOPS))
        is_over = is_unknown & ((tl.sum((stops == token).to(tl.int32), axis=0) > 0) | (token < 0))
        row = tl.where(is_over, no_row, row)
        token = tl.where(is_over, 0, token)
    tl.store(rows_ptr + index, row)
    tl.store(ids_ptr + index, token)


def follow(*, given: Tensor, sampled: Tensor | None, rows: Tensor, ids: Tensor, no_row: int) -> None:
    """given [B, NUM_COLUMNS + S] int64: row, id, source and S ids (a power of 2) at which the row ends.

    Writes rows and ids [B] int64. Where the source is not negative, the id is sampled[source] (`sampled` [N] int64);
    the row is `no_row` if that id is negative or one of the S.
    """
    num_stops = given.shape[1] - NUM_COLUMNS
    _follow[(given.shape[0],)](
        given, given.stride(0), sampled, rows, ids, no_row, COLUMNS=NUM_COLUMNS, STOPS=num_stops, num_warps=1
    )
