"""Resolves the rows and ids of a step from the ids that the step before sampled on the device."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


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
