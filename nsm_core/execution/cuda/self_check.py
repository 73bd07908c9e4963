"""What the kernels must show on the device that they were just compiled for, before they serve anybody."""

from __future__ import annotations

import torch
from torch import Tensor

from nsm_core.execution.cuda.executor import CudaExecutor
from nsm_core.execution.cuda.options import CudaWeights
from nsm_core.model.nsm import NsmModel

NUM_TOKENS = 2
REPEATS = 3
# Relative, of logits against the model as it is written in fp32; some twenty times what was seen
TOLERANCE = {CudaWeights.BF16: 0.06, CudaWeights.FP16: 0.01, CudaWeights.FP32: 1e-4}


@torch.inference_mode()
def why_wrong(executor: CudaExecutor, model: NsmModel) -> str | None:
    """Reads a few tokens in all rows of the pool, none of which may be leased; None where all is well.

    A row in the full batch must have the bits that it has alone, every time, and be near the model as it is written.
    """
    num_rows = executor.pool.num_rows
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (NUM_TOKENS, num_rows), generator=generator)
    some = sorted({0, num_rows // 2, num_rows - 1})
    batches = [_logits(executor, list(range(num_rows)), ids) for _ in range(REPEATS)]
    for row in some:
        alone = _logits(executor, [row], ids[:, row : row + 1])
        if not all(batch[row].equal(alone[0]) for batch in batches):
            return f"row {row} of {num_rows} has other bits than alone, or at another time"
    want, state = torch.empty(0), model.initial_state(len(some))
    for token in ids[:, some].to(batches[0].device):
        hidden, state = model.step(token, state)
        want = model.logits(hidden)
    error = float((batches[0][some] - want).norm() / want.norm().clamp(min=1e-30))
    tolerance = TOLERANCE[executor.options.weights]
    return None if error <= tolerance else f"logits are off by {error:.2g}, {tolerance:g} is allowed"


def _logits(executor: CudaExecutor, rows: list[int], ids: Tensor) -> Tensor:
    """ids [tokens, len(rows)], read from the start; logits [len(rows), V] after the last. The rows are free again."""
    for row in rows:
        executor.pool.lease(row)
        executor.pool.write(row, executor.initial)
    try:
        for token in ids.tolist():
            hidden = executor.step(rows, token)
        return executor.logits(hidden)
    finally:
        for row in rows:
            executor.pool.free(row)
