"""Counter-based randomness: a draw is a pure function of (seed, choice index, position).

There is no generator state, so a resumed, moved or forked session draws the same numbers as an uninterrupted one.

The construction, exactly (all words are unsigned 64-bit integers):

- generator: Philox4x64-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3")
- key:       (seed, choice_index)
- counter:   (position + 1, 0, 0, 0), least significant word first
- uniform:   (first output word >> 11) * 2**-53, a double in [0, 1)

Nothing else enters. `position` is the absolute position of the token being sampled: the number of tokens fed before it
in the whole session. The counter is one higher because numpy's Philox increments it before it makes a block.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_WORD_BITS = 64
_MANTISSA_BITS = 53


def uniform(seed: int, choice_index: int, position: int) -> float:
    """The draw at this position, in [0, 1). Every argument is in [0, 2**64)."""
    philox = np.random.Philox(key=seed | (choice_index << _WORD_BITS), counter=position)
    return float(int(philox.random_raw()) >> (_WORD_BITS - _MANTISSA_BITS)) * 2.0**-_MANTISSA_BITS


def uniforms(keys: Sequence[tuple[int, int, int]]) -> npt.NDArray[np.float64]:
    """`uniform` of each (seed, choice index, position): [B] float64."""
    return np.array([uniform(*key) for key in keys], dtype=np.float64)
