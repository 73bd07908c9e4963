"""The number of times that one sequence has sampled each token, for penalties."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

MAX_TOKEN_COUNT = 2**53  # in one session; exact in float64, and far below the end of int64


class TokenCounts(Mapping[int, int]):
    """A mapping {token id: count above 0} over a dense array.

    The sampler reads the array directly, so the cost of a penalty does not grow with the session. Other mappings are
    converted for every token.
    """

    def __init__(self, vocab_size: int, counts: Mapping[int, int] | None = None) -> None:
        self._counts: npt.NDArray[np.int64] = np.zeros(vocab_size, dtype=np.int64)
        for token_id, count in (counts or {}).items():
            self._counts[token_id] = count

    def add(self, token_id: int) -> None:
        """Counts one more sample of the token."""
        self._counts[token_id] += 1

    def remove(self, token_id: int) -> None:
        """Reverts one `add`. Raises KeyError if the count is 0."""
        if self._counts[token_id] == 0:
            raise KeyError(token_id)
        self._counts[token_id] -= 1

    def nonzero(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(ids [N] ascending, counts [N]) of the tokens sampled at least once."""
        ids = np.flatnonzero(self._counts)
        return ids, self._counts[ids]

    def __getitem__(self, token_id: int) -> int:
        if not 0 <= token_id < len(self._counts) or self._counts[token_id] == 0:
            raise KeyError(token_id)
        return int(self._counts[token_id])

    def __iter__(self) -> Iterator[int]:
        return iter(np.flatnonzero(self._counts).tolist())

    def __len__(self) -> int:
        return int(np.count_nonzero(self._counts))
