"""The figures of an inspection as one report for each layer, means over heads and tokens."""

from __future__ import annotations

import dataclasses
import math

from nsm_core.inspection.figures import smoothness, state_figures, token_figures
from nsm_core.inspection.probe import layer_routing
from nsm_core.inspection.reading import Inspection, LayerActivity
from nsm_core.inspection.report import LayerReport, StateActivity
from nsm_core.inspection.routing import LayerRouting
from nsm_core.inspection.routing_capture import STATES


def summarise(inspection: Inspection, *, has_tokens: bool = False) -> tuple[LayerReport, ...]:
    """Reports of the layers with routed states. `has_tokens`: with the routing of each token."""
    reports = []
    for layer in inspection.layers:
        if layer.kind in STATES:
            report = _summarise(layer)
            reports.append(dataclasses.replace(report, tokens=_routes(layer)) if has_tokens else report)
    return tuple(reports)


def skipped_layers_note(inspection: Inspection) -> str | None:
    """A sentence that names the layers without a report, and the reason. None if all have one."""
    if not inspection.skipped:
        return None
    names = ", ".join(inspection.skipped)
    return f"no figures for layers {names}: baseline layers have no memory slots, so routing does not apply to them"


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


def _routes(layer: LayerActivity) -> tuple[LayerRouting, ...]:
    if layer.write is None or layer.read is None:
        return ()
    return tuple(
        layer_routing(layer.name, layer.kind, write, read) for write, read in zip(layer.write, layer.read, strict=True)
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
