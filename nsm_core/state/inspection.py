"""Figures of a stored state's use: how far memory slots moved from their learned start, how full windows are.

The shares and the effective number of slots come from where the state is now, not from how often it was written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from nsm_core.errors import InvalidRequest
from nsm_core.state.report import Detail, LayerUse, SlotFigures, SlotUse, StateReport
from nsm_core.state.spec import POSITION, State, StateSpec

# A slot that moved by less than this share of its start's length counts as untouched: rounding moves it by less.
UNTOUCHED = 1e-4
_PREFIX, _SLOTS, _GATED, _CACHE, _TAIL = "layers.", "slots", "gated", "kv", "conv_tail"
_MATRIX = "matrix"  # of RWKV-7: rows by channels of the key, which are written and read as keyed slots are


def inspect_state(
    spec: StateSpec, raw: bytes | None, initial: State, *, detail: Detail = Detail.LAYER, layer: int | None = None
) -> StateReport:
    """Describes the packed state `raw` (None: the start itself) beside `initial` [1, *shape], the learned start.

    `layer`: only that one; Detail.SLOT needs it. Raises InvalidRequest, and SnapshotCorrupt when `raw` does not fit.
    """
    state = dict(initial) if raw is None else spec.unpack(raw)
    numbers = sorted({_layer_of(tensor.name) for tensor in spec.tensors if tensor.name.startswith(_PREFIX)})
    _check_request(numbers, detail, layer)
    wanted = numbers if layer is None else [layer]
    described = (
        _describe(spec, number, part, state, initial, detail) for number in wanted for part in _parts(spec, number)
    )
    layers = tuple(use for use in described if use is not None)
    return StateReport(position=int(state[POSITION][0]), num_bytes=spec.num_bytes, layers=layers)


def _layer_of(name: str) -> int:
    return int(name.removeprefix(_PREFIX).partition(".")[0])


def _check_request(numbers: list[int], detail: Detail, layer: int | None) -> None:
    if layer is not None and layer not in numbers:
        raise InvalidRequest(f"layer must be one of this model's {len(numbers)} layers, got {layer}", param="layer")
    if detail is Detail.SLOT and layer is None:
        raise InvalidRequest("layer is required with detail=slot: slots are shown of one layer", param="layer")


def _parts(spec: StateSpec, layer: int) -> list[int | None]:
    """The numbers of those in one layer that have states of their own; None: the layer is one."""
    prefix = f"{_PREFIX}{layer}."
    names = [tensor.name.removeprefix(prefix) for tensor in spec.tensors if tensor.name.startswith(prefix)]
    found = {int(name.partition(".")[0]) if "." in name else None for name in names}
    return sorted(found, key=lambda part: -1 if part is None else part)


def _describe(
    spec: StateSpec,
    layer: int,
    part: int | None,
    state: Mapping[str, Tensor],
    initial: State,
    detail: Detail,
) -> LayerUse | None:
    """None for a layer that is neither a slot memory nor attention."""
    prefix = f"{_PREFIX}{layer}." if part is None else f"{_PREFIX}{layer}.{part}."
    num_bytes = sum(tensor.num_bytes for tensor in spec.tensors if tensor.name.startswith(prefix))
    if prefix + _CACHE in state:
        window = state[prefix + _CACHE].shape[3]
        filled = min(int(state[POSITION][0]), window)
        return LayerUse(layer=layer, kind="attention", num_bytes=num_bytes, window=window, filled=filled, part=part)
    name = next((prefix + own for own in (_GATED, _SLOTS, _MATRIX) if prefix + own in state), None)
    if name is None:
        return None
    now, start = (value[name][0].detach().to("cpu", torch.float64) for value in (state, initial))
    kind: Literal["slots", "keyed", "gated", "matrix"]
    if name.endswith((_GATED, _MATRIX)):
        kind = "gated" if name.endswith(_GATED) else "matrix"
    else:  # slots that are keyed by routes start empty, all others where training put them
        kind = "slots" if start.any() else "keyed"
    has_keys = kind == "slots" and state[prefix + _TAIL].shape[-1] != start.shape[0] * start.shape[2]
    heads = tuple(_use(now[head, None], start[head, None], detail, has_keys) for head in range(len(now)))
    return LayerUse(
        layer=layer,
        kind=kind,
        num_bytes=num_bytes,
        use=_use(now, start, Detail.LAYER, has_keys),
        heads=None if detail is Detail.LAYER else heads,
        part=part,
    )


def _use(now: Tensor, start: Tensor, detail: Detail, has_keys: bool) -> SlotUse:
    """now, start: [H, M, 2 K], key before value, or without keys [H, M, K]."""
    distance, length = (now - start).norm(dim=-1), start.norm(dim=-1)
    keys, values = now.chunk(2, dim=-1) if has_keys else (torch.full_like(now, torch.nan), now)
    figures = torch.stack(
        (
            keys.norm(dim=-1),
            values.norm(dim=-1),
            distance / length,
            (now * start).sum(dim=-1) / (now.norm(dim=-1) * length),
        ),
        dim=-1,
    ).flatten(0, 1)
    return SlotUse(
        num_slots=now.shape[1],
        untouched_share=float((distance <= UNTOUCHED * length).double().mean()),
        effective_slots=_finite(_effective(distance.square())),
        mean=_figures(figures.mean(dim=0)),
        slots=tuple(map(_figures, figures)) if detail is Detail.SLOT else None,
    )


def _effective(moved: Tensor) -> float:
    """exp(entropy) of moved [H, M] as shares of a head's slots, mean over heads; a head at rest counts 0."""
    total = moved.sum(dim=-1, keepdim=True)
    shares = moved / total.where(total > 0, torch.ones_like(total))
    effective = torch.special.entr(shares).sum(dim=-1).exp()
    return float((effective * (total[..., 0] != 0)).mean())


def _figures(row: Tensor) -> SlotFigures:
    key_norm, value_norm, moved, cosine = map(_finite, row.tolist())
    return SlotFigures(key_norm=key_norm, value_norm=value_norm, moved=moved, cosine=cosine)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
