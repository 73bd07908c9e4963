"""A grammar at one position of one answer: which tokens may follow, and whether the answer may end here."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from nsm_core.errors import GrammarFailed

if TYPE_CHECKING:  # a first grammar imports it
    from llguidance import LLExecutor, LLMatcher

# One row for each position, ceil(V / 32) words of 32 tokens, the lowest bit first; a set bit allows its token
MaskWords = npt.NDArray[np.int32]
WORD_BITS = 32


def mask_width(vocab_size: int) -> int:
    """The words of one row."""
    return -(-vocab_size // WORD_BITS)


class TokenMatcher:
    """Belongs to one answer, on one thread. After a GrammarFailed it is of no further use."""

    def __init__(self, inner: LLMatcher) -> None:
        self.inner = inner

    def copy(self) -> TokenMatcher:
        """An independent matcher at the same position."""
        return TokenMatcher(self.inner.deep_copy())

    def advance(self, token_id: int) -> None:
        """The answer's next token. Raises GrammarFailed for one that may not follow."""
        if not self.inner.consume_token(token_id):
            raise failure_of(self)

    @property
    def is_complete(self) -> bool:
        """Whether the answer is whole and nothing may follow."""
        return bool(self.inner.is_stopped())

    def num_valid(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens may follow, one after the other. The position stays."""
        return int(self.inner.validate_tokens(list(token_ids)))


def failure_of(matcher: TokenMatcher) -> GrammarFailed:
    """The error of an answer whose matcher cannot go on; its text names no part of the grammar."""
    reason = matcher.inner.stop_reason()
    return GrammarFailed(f"the answer cannot go on within its grammar ({reason}); nothing was sampled outside of it")


def fill_masks(words: MaskWords, positions: Sequence[tuple[TokenMatcher, int, Sequence[int]]]) -> None:
    """Writes the masks of many positions at once, without the interpreter's lock.

    words [R, W]: row k is of the matcher's position for each (matcher, k, drafts), and row k + 1 + i of the one after
    drafts[: i + 1], which must be valid there. A matcher that fails leaves the mask of an answer that may only end: the
    caller asks `inner.is_error`.
    """
    num_bytes = words.shape[1] * words.itemsize
    if any(drafts for _, _, drafts in positions):
        drafted = [(matcher.inner, row, list(drafts)) for matcher, row, drafts in positions]
        _executor().unsafe_compute_mask_ptr_with_draft_token(drafted, words.ctypes.data, num_bytes, len(words))
    else:
        # one by one: the library's threads spin while they wait, which takes twice the CPU time of the masks
        start = words.ctypes.data
        for matcher, row, _ in positions:
            matcher.inner.unsafe_compute_mask_ptr(start + row * num_bytes, num_bytes)


@functools.cache
def _executor() -> LLExecutor:
    from llguidance import LLExecutor

    return LLExecutor(num_threads=1)
