"""Sampling where the logits are: only the chosen ids come to the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from nsm_core.sampling.params import SamplingParams


class Drawn(Protocol):
    """What a draw needs of a row."""

    @property
    def params(self) -> SamplingParams: ...

    @property
    def position(self) -> int: ...


def sample_on_device(logits: Tensor, rows: Sequence[Drawn]) -> list[int | None]:
    """logits [B,V] fp32 on a GPU, for rows that need no adjustment; None for a row that is not finite.

    The draws are those of the host to the bit. Weights are sums of other roundings: a token differs where the draw
    lies within rounding of the border between two.
    """
    from nsm_core.sampling.kernel import NOT_FINITE, choose_tokens

    wishes = None
    if not all(row.params.is_greedy for row in rows):
        wishes = torch.from_numpy(_wishes(rows)).to(logits.device)
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        chosen: list[int] = choose_tokens(logits, wishes).tolist()  # the one wait for the device in a step
    return [None if token_id == NOT_FINITE else token_id for token_id in chosen]


def fits_device(logits: Tensor) -> bool:
    """Whether the kernel takes logits of this kind."""
    from nsm_core.sampling.kernel import LARGEST_VOCABULARY

    return logits.dtype == torch.float32 and logits.stride(-1) == 1 and logits.shape[-1] <= LARGEST_VOCABULARY


def _wishes(rows: Sequence[Drawn]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """See `choose_tokens`."""
    wholes = [(row.params.seed, row.params.choice_index, row.position, row.params.top_k) for row in rows]
    parts = [(row.params.temperature, row.params.top_p, row.params.min_p) for row in rows]
    return np.concatenate(
        (np.array(wholes, dtype=np.uint64).view(np.int64), np.array(parts, dtype=np.float64).view(np.int64)), axis=1
    )
