"""The report on a stored state, as plain values. No torch here."""

from __future__ import annotations

import dataclasses
import enum
from typing import Literal


class Detail(enum.StrEnum):
    """How finely a state is described; each level holds those before it."""

    LAYER = "layer"
    HEAD = "head"
    SLOT = "slot"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlotFigures:
    """One slot, or the mean over several. `moved`: distance from the learned start over the start's length.

    None where a figure is not defined: a start of zeros (keyed slots), numbers that are not finite, slots without keys.
    """

    key_norm: float | None
    value_norm: float | None
    moved: float | None
    cosine: float | None  # with the learned start


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlotUse:
    """Slots of one head, or of all heads of a layer. `effective_slots`: exp(entropy) of the shares that each slot of a
    head has in the squared distance moved, mean over heads; 0 when none has moved.
    """

    num_slots: int
    untouched_share: float
    effective_slots: float | None
    mean: SlotFigures
    slots: tuple[SlotFigures, ...] | None = None  # of one head, with Detail.SLOT


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerUse:
    """One layer: `use` (and `heads`, if asked for) of slot memories, `window` and `filled` of attention, in tokens.

    Of a head's matrix (RWKV-7) the slots are its rows, one for each channel of the key.

    `part`: of several in one layer, which.
    """

    layer: int
    kind: Literal["slots", "keyed", "gated", "matrix", "attention"]
    num_bytes: int
    use: SlotUse | None = None
    heads: tuple[SlotUse, ...] | None = None
    window: int | None = None
    filled: int | None = None
    part: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateReport:
    """A whole state: `position` tokens were fed to reach it."""

    position: int
    num_bytes: int
    layers: tuple[LayerUse, ...]
