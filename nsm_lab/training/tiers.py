"""Rows that are read with fewer slots, so that a model learns to do with the sizes it may be served in."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_STREAM = 0x71E5  # draws of other things have other seeds


class TierDraw:
    """With how many slots each row is read: by a chance of `share` one of `sizes`, each as likely, else all of them.

    A pure function of seed, process and step, so that a resumed run agrees; rows that go on from the state of the step
    before keep their first values.
    """

    def __init__(self, sizes: Sequence[int], share: float, *, rows: int, seed: int, rank: int = 0) -> None:
        """`sizes`: numbers of slots, the last of them all."""
        self._sizes, self._share, self._num_rows = torch.tensor(sizes), share, rows
        self._seed = (seed << 32) + (rank << 16) + _STREAM
        self._drawn: Tensor | None = None

    def rows(self, step: int, *, is_carried: bool) -> Tensor | None:
        """[rows] int64; None: all rows with all slots, as in a model or a run without tiers."""
        if self._share == 0 or len(self._sizes) < 2:
            return None
        if self._drawn is None or not is_carried:
            generator = torch.Generator().manual_seed(self._seed ^ (step << 20))
            choice = torch.randint(len(self._sizes), (self._num_rows,), generator=generator)
            is_small = torch.rand(self._num_rows, generator=generator) < self._share
            self._drawn = torch.where(is_small, self._sizes[choice], self._sizes[-1])
        return self._drawn
