"""Log-probabilities of the model itself: the log-softmax of its raw logits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nsm_core.errors import NumericalError
from nsm_core.sampling.processors import Row
from nsm_core.sampling.result import TokenLogprob

_CHUNK_ROWS = 256  # rows that are on the host at once


def token_logprob(logits: Row, token_id: int, num_top: int) -> TokenLogprob:
    """logits [V], finite. `num_top` alternatives, most likely first, the lower id first among equals."""
    largest = logits.max()
    with np.errstate(over="ignore"):  # a logit too far below the largest adds nothing
        log_total = math.log(np.exp(logits - largest).sum(dtype=np.float64))

    def logprob(of: int) -> float:
        return float(logits[of]) - float(largest) - log_total

    top = tuple((top_id, logprob(top_id)) for top_id in _most_likely(logits, num_top))
    return TokenLogprob(token_id=token_id, logprob=logprob(token_id), top=top)


def prompt_logprobs(logits: Tensor, ids: Tensor | Sequence[int], num_top: int) -> tuple[TokenLogprob, ...]:
    """Scores given tokens: row t of logits [T, V] is the distribution that token ids[t] came from.

    The caller pairs them: the logits after token t belong with token t + 1. Only a bounded number of rows is converted
    at a time, and no [T, V] array of log-probabilities is made. Raises NumericalError when a row is not finite.
    """
    token_ids = ids.tolist() if isinstance(ids, Tensor) else list(ids)
    if len(token_ids) != logits.shape[0]:
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(token_ids)} tokens")
    scores: list[TokenLogprob] = []
    for start in range(0, len(token_ids), _CHUNK_ROWS):
        for row in to_numpy(logits[start : start + _CHUNK_ROWS]):
            if not np.isfinite(row).all():
                raise NumericalError(f"the model gave logits that are not finite for prompt token {len(scores)}")
            scores.append(token_logprob(row, token_ids[len(scores)], num_top))
    return tuple(scores)


def to_numpy(logits: Tensor) -> npt.NDArray[np.float32]:
    """logits [..., V] on any device -> fp32 array on the host, rows contiguous; shares memory where it can."""
    array: npt.NDArray[np.float32] = logits.detach().to(device="cpu", dtype=torch.float32).contiguous().numpy()
    return array


def _most_likely(logits: Row, num: int) -> list[int]:
    num = min(num, len(logits))
    if num == 0:
        return []
    threshold = torch.from_numpy(logits).topk(num).values[-1].item()
    candidates = np.flatnonzero(logits >= threshold)
    order = np.argsort(-logits[candidates], kind="stable")  # stable: ids ascend among equals
    ids: list[int] = candidates[order[:num]].tolist()
    return ids
