"""Forward hooks that record inputs and outputs of the parts of layers. The layers stay as they are."""

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

# Names of the parts that are hooked, if a mixer has them
PARTS = ("project", "conv", "router", "read_bias", "communication", "write")


@dataclasses.dataclass(slots=True)
class HookedLayer:
    """One mixer of a model. `name`: the layer's number; a dot and a number follow if the layer has several mixers.

    `inputs`, `outputs`: first argument and result of each part's last call; `extra_inputs`: the other arguments.
    `active`: the slots [B,H,M] that the router could choose from, None: all.
    """

    name: str
    mixer: Mixer
    inputs: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    outputs: dict[str, Any] = dataclasses.field(default_factory=dict)
    extra_inputs: dict[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    active: Tensor | None = None

    def state_of(self, state: State) -> State:
        """The tensors that this mixer carries."""
        prefix = f"layers.{self.name}."
        return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def hookable_layers(model: NsmModel) -> list[HookedLayer]:
    """All mixers, bottom first. A composite mixer is represented by its parts."""
    found = []
    for number, block in enumerate(model.layers):
        for path, module in block.mixer.named_modules():
            if isinstance(module, Mixer) and not isinstance(module, CompositeMixer):
                digits = (part for part in path.split(".") if part.isdigit())
                found.append(HookedLayer(".".join((str(number), *digits)), module))
    return found


@contextlib.contextmanager
def hooked(layers: list[HookedLayer]) -> Iterator[None]:
    """While open, calls of the parts are recorded in the layers."""

    def recorder(layer: HookedLayer, part: str) -> Callable[..., None]:
        def hook(module: object, inputs: tuple[Tensor, ...], named: dict[str, Tensor], outputs: object) -> None:
            layer.inputs[part], layer.extra_inputs[part], layer.outputs[part] = inputs[0], inputs[1:], outputs
            if part == "router":
                layer.active = named.get("active")

        return hook

    with contextlib.ExitStack() as stack:
        for layer in layers:
            for part in PARTS:
                module = getattr(layer.mixer, part, None)
                if module is not None:
                    stack.callback(module.register_forward_hook(recorder(layer, part), with_kwargs=True).remove)
        yield


def clear_hooked(layers: list[HookedLayer]) -> None:
    """Drops the records. Slots communicate at few tokens: an old record must not count for the next token."""
    for layer in layers:
        layer.inputs.clear()
        layer.outputs.clear()
        layer.active = None
