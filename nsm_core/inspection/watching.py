"""Watches the parts of a model's layers while it reads, without a change to the layers."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from nsm_core.model.composite import CompositeMixer
from nsm_core.model.mixer import Mixer
from nsm_core.model.nsm import NsmModel
from nsm_core.state.spec import State

# What is watched where a mixer has it: what it projects its input to, and what becomes of that
PARTS = ("project", "conv", "router", "read_bias", "communication", "write")


@dataclasses.dataclass(slots=True)
class WatchedLayer:
    """One mixer of a model. `name`: its layer's number; of several in one layer, with its own behind a dot.

    `given` and `made`: what each of its parts was called with last, and returned; `others`: further arguments.
    `active`: the slots [B,H,M] that the router was allowed, None: all.
    """

    name: str
    mixer: Mixer
    given: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    made: dict[str, Any] = dataclasses.field(default_factory=dict)
    others: dict[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    active: Tensor | None = None

    def state_of(self, state: State) -> State:
        """The tensors that this mixer carries."""
        prefix = f"layers.{self.name}."
        return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def layers_of(model: NsmModel) -> list[WatchedLayer]:
    """All mixers, bottom first; those that others are made of are told by their parts."""
    found = []
    for number, block in enumerate(model.layers):
        for path, module in block.mixer.named_modules():
            if isinstance(module, Mixer) and not isinstance(module, CompositeMixer):
                digits = (part for part in path.split(".") if part.isdigit())
                found.append(WatchedLayer(".".join((str(number), *digits)), module))
    return found


@contextlib.contextmanager
def watching(layers: list[WatchedLayer]) -> Iterator[None]:
    """While open, the layers are told what their parts are given and make."""

    def keep(layer: WatchedLayer, part: str) -> Callable[..., None]:
        def hook(module: object, given: tuple[Tensor, ...], named: dict[str, Tensor], made: object) -> None:
            layer.given[part], layer.others[part], layer.made[part] = given[0], given[1:], made
            if part == "router":
                layer.active = named.get("active")

        return hook

    with contextlib.ExitStack() as stack:
        for layer in layers:
            for part in PARTS:
                module = getattr(layer.mixer, part, None)
                if module is not None:
                    stack.callback(module.register_forward_hook(keep(layer, part), with_kwargs=True).remove)
        yield


def forget(layers: list[WatchedLayer]) -> None:
    """What was seen: an exchange between slots happens at few tokens, and must not be taken for one at the next."""
    for layer in layers:
        layer.given.clear()
        layer.made.clear()
        layer.active = None
