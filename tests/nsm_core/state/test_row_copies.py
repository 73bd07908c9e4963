"""Rows that are copied together, by the kernel for GPUs too: in its interpreter where there is none."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nsm_core.state.row_copies import RowCopy, StateRows, copy_rows, launch_copy
from nsm_core.state.spec import State

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def tensors(seed: int, num_rows: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    large = torch.randn(num_rows, 3, 1500, generator=generator)  # more words than one program copies
    return {
        "position": torch.randint(1 << 40, (num_rows,), generator=generator).to(DEVICE),
        "slots": large.to(DEVICE),
        "ring": torch.randn(num_rows, 2, 7, generator=generator).to(torch.bfloat16).to(DEVICE),
    }


def equal(one: State, row: int, other: State, other_row: int) -> bool:
    return all(tensor[row].equal(other[name][other_row]) for name, tensor in one.items())


PAIRS = [(0, 4), (3, 1), (1, 1)]  # of a target's row and its source's


def test_each_row_becomes_its_source_and_no_other_changes() -> None:
    source, target, before = tensors(1, 5), tensors(2, 4), tensors(2, 4)
    other, more = tensors(3, 2), tensors(4, 2)
    rows, from_rows = StateRows(target), StateRows(source)
    launch_copy(rows)
    copies = [RowCopy(rows, row, from_rows, source_row) for row, source_row in PAIRS]
    copy_rows([*copies, RowCopy(StateRows(more), 1, StateRows(other), 0)])  # of several blocks at once
    copy_rows([])
    for row, source_row in PAIRS:
        assert equal(target, row, source, source_row)
    assert equal(target, 2, before, 2)
    assert equal(more, 1, other, 0)


def test_the_kernel_copies_the_words_of_all_tensors() -> None:
    pytest.importorskip("triton", reason="the compiler is not installed")
    from nsm_core.state.row_kernel import WORDS, copy_words

    source, target, before = tensors(1, 5), tensors(2, 4), tensors(2, 4)
    addresses = [
        (StateRows(source).addresses(source_row), StateRows(target).addresses(row)) for row, source_row in PAIRS
    ]
    sizes = [tensor[0].nbytes // 4 for tensor in source.values()]
    assert max(sizes) > WORDS
    parts = [(index, at, min(WORDS, size - at)) for index, size in enumerate(sizes) for at in range(0, size, WORDS)]
    copy_words(torch.from_numpy(np.array(addresses)).to(DEVICE), torch.tensor(parts, device=DEVICE))
    for row, source_row in PAIRS:
        assert equal(target, row, source, source_row)
    assert equal(target, 2, before, 2)
