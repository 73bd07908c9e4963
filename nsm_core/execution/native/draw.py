"""Draws tokens by the native kernels: the same steps as the sampler's, several times as fast.

The uniform draws have the sampler's bits. Weights are rounded differently: a token differs if the draw lies within
rounding of the boundary between two tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from nsm_core.execution.native.library import load_library, variants
from nsm_core.sampling.sampler import SampledRow


def draw_tokens(
    logits: npt.NDArray[np.float32], indices: Sequence[int], rows: Sequence[SampledRow]
) -> npt.NDArray[np.int64]:
    """logits [B, V] contiguous, finite in the rows indices [R], which belong to `rows` [R]. Returns ids [R]."""
    library = load_library()
    if library is None:
        raise RuntimeError("the native kernels were not built")
    wholes = [(row.params.seed, row.params.choice_index, row.position, row.params.top_k) for row in rows]
    parts = [(row.params.temperature, row.params.top_p, row.params.min_p) for row in rows]
    numbers = np.array(indices, np.int64), np.array(wholes, np.uint64), np.array(parts, np.float64)
    chosen = np.empty(len(rows), np.int64)
    index_address, wholes_address, parts_address = (array.ctypes.data for array in numbers)
    is_done = library.nsm_draw(
        *(variants()[0].encode(), logits.ctypes.data, logits.shape[1], index_address, len(rows)),
        *(wholes_address, parts_address, chosen.ctypes.data),
    )
    if not is_done:
        raise MemoryError("no memory to draw tokens")
    return chosen
