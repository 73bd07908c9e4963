"""The routing of a token in each layer, as plain values for an answer (docs/inspection.md). No torch here."""

from __future__ import annotations

import dataclasses

TOP_STATES = 16  # of each list: an answer stays small
MAX_ROUTED_REQUESTS = 8  # requests with include_routing that one engine runs at a time
MAX_ROUTED_TOKENS = 1024  # of all choices of a request: a turn holds its routing in memory until it ends


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerRouting:
    """One layer, at one token. `write`, `read`: (state, weight summed over heads), largest first, at most TOP_STATES.

    `entropy`: of the write weights, mean over heads, 1 where all states get the same; `states_per_token`: exp of it,
    in states.
    """

    layer: str
    kind: str
    num_states: int
    num_heads: int
    entropy: float
    states_per_token: float
    write: tuple[tuple[int, float], ...]
    read: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenRouting:
    """Of the step that made a token. `position`: tokens that were read before it."""

    position: int
    layers: tuple[LayerRouting, ...]
