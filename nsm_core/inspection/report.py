"""The use of a model's states over a text, as plain values for an answer. No torch here."""

from __future__ import annotations

import dataclasses

from nsm_core.inspection.routing import LayerRouting

MAX_RECENT_TOKENS = 512  # each is a step of the model, for one answer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateActivity:
    """One state, its parts in all heads together. None where a figure is not defined.

    `importance`: mean over tokens of its write and read weights, summed over heads; `utilisation`: share of tokens that
    replace a thousandth of it or more, mean over heads; `half_life`: median over heads of the tokens until half of it
    is replaced, None: never; `specialisation`: 0 if all tokens write to it alike, 1 if one token alone does.
    """

    importance: float
    utilisation: float
    half_life: float | None
    specialisation: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerReport:
    """One layer with routed states, means over the text's tokens and the heads; see TokenFigures and `smoothness`.

    `tokens`: how each token of the text was routed, if that was asked for.
    """

    layer: str
    kind: str
    entropy: float
    states_per_token: float
    sparsity: float
    strength: float
    smoothness: float | None
    states: tuple[StateActivity, ...]
    tokens: tuple[LayerRouting, ...] = ()
