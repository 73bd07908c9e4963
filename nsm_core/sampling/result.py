"""Results of the sampler. Plain values: no torch here."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

# The id of a row whose logits are not finite, where ids are on a device
NOT_FINITE = -1
# The same of a row that has ended or paused before: it was not computed
SKIPPED = -2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Natural-log probability of one token, and of the most likely ones at its position (most likely first).

    Always of the model's own distribution: the log-softmax of the raw logits, before bias, penalties, temperature and
    filters.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class SampledToken(NamedTuple):
    """One row's choice; `logprob` is set when the row's params ask for it."""

    token_id: int
    logprob: TokenLogprob | None = None
