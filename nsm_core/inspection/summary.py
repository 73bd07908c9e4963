"""An inspection's figures, head by head and token by token, as one report."""

from __future__ import annotations

import math

from nsm_core.inspection.figures import smoothness, state_figures, token_figures
from nsm_core.inspection.looks import STATES
from nsm_core.inspection.reading import Inspection, LayerActivity
from nsm_core.inspection.report import LayerReport, StateActivity


def summarise(inspection: Inspection) -> tuple[LayerReport, ...]:
    """Of its layers with routed states."""
    return tuple(_summarise(layer) for layer in inspection.layers if layer.kind in STATES)


def untold_words(inspection: Inspection) -> str | None:
    """Which layers nothing is said of, and why; None: there are none."""
    if not inspection.untold:
        return None
    names = ", ".join(inspection.untold)
    return f"not looked into: layers {names}, baselines whose state is one whole that tokens are not routed within"


def _summarise(layer: LayerActivity) -> LayerReport:
    tokens, states = token_figures(layer), state_figures(layer)
    columns = (
        states.importance.sum(dim=0),
        states.utilisation.mean(dim=0),
        states.half_life.median(dim=0).values,
        states.specialisation.mean(dim=0),
    )
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return LayerReport(
        layer=layer.name,
        kind=layer.kind,
        entropy=float(tokens.entropy.mean()),
        states_per_token=float(tokens.states_per_token.mean()),
        sparsity=float(tokens.sparsity.mean()),
        strength=float(tokens.strength.mean()),
        smoothness=_finite(float(smoothness(layer).nanmean())),
        states=tuple(
            StateActivity(importance=weight, utilisation=use, half_life=_finite(life), specialisation=special)
            for weight, use, life, special in rows
        ),
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
