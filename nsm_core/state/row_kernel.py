"""The kernel that copies rows of states."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WORD_BYTES = 4
WORDS = 4096  # that one program copies


@triton.jit(do_not_specialize=["num_tensors"])  # one program for every model
def _copy_words(addresses_ptr, parts_ptr, num_tensors, WORDS: tl.constexpr):
    copy, part = tl.program_id(1), tl.program_id(0)
    tensor = tl.load(parts_ptr + 3 * part)
    first = tl.load(parts_ptr + 3 * part + 1)
    number = tl.load(parts_ptr + 3 * part + 2)
    at = tl.arange(0, WORDS)
    source = tl.load(addresses_ptr + 2 * copy * num_tensors + tensor).to(tl.pointer_type(tl.int32)) + first
    target = tl.load(addresses_ptr + (2 * copy + 1) * num_tensors + tensor).to(tl.pointer_type(tl.int32)) + first
    words = tl.load(source + at, mask=at < number)
    tl.store(target + at, words, mask=at < number)


def copy_words(addresses: Tensor, parts: Tensor) -> None:
    """addresses [copies, 2, tensors] int64: addresses of the tensors of sources, and of targets. parts [n, 3] int64:
    a tensor, its first word and a number of words, at most WORDS; every copy takes all of them. Does not wait.
    """
    num_copies, _, num_tensors = addresses.shape
    with torch.cuda.device_of(parts):
        _copy_words[(len(parts), num_copies)](addresses, parts, num_tensors, WORDS=WORDS, num_warps=4)
