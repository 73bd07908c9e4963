"""The text that names a model's layers, e.g. `NNNW`, `[NW]` or `N(WNL)`, as a list. No torch here."""

from __future__ import annotations

import dataclasses
import re

from nsm_core.errors import ConfigError

# Slot memory, the same with communication, gated slots, linear recurrence, window and full attention, external memory:
# see nsm_core/model/registry.py
LAYER_KINDS = "NCGKLWAM"
# A small letter is a layer that another package registers, as nsm_lab/baselines does
_ANY = f"[{LAYER_KINDS}a-z]"
_LAYER = re.compile(rf"{_ANY}|\({_ANY}{{2,}}\)|\[{_ANY}{{2,}}\]")


@dataclasses.dataclass(frozen=True, slots=True)
class LayerPlan:
    """The mixers of one layer; more than one run `in_parallel` on the same input, or one after the other."""

    kinds: str
    in_parallel: bool = False


def parse_layer_pattern(pattern: str) -> tuple[LayerPlan, ...]:
    """A letter is a layer; letters in [] are parallel mixers of one layer, letters in () follow each other in one.

    Raises ConfigError.
    """
    plans, rest = [], pattern
    while found := _LAYER.match(rest):
        text = found.group()
        plans.append(LayerPlan(text.strip("()[]"), in_parallel=text.startswith("[")))
        rest = rest[found.end() :]
    if rest or not plans:
        raise ConfigError(
            f"layer_pattern must be made of the letters {', '.join(LAYER_KINDS)}, of which two or more may stand in [] "
            f"(parallel) or () (in sequence), or of small letters that a package registers, got {pattern!r}"
        )
    return tuple(plans)
