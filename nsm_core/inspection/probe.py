"""Captures the routing of a running text's token by reading the token once more, beside the engine's own step."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nsm_core.formats.one_thread import one_thread
from nsm_core.inspection.layer_hooks import clear_hooked, hookable_layers, hooked
from nsm_core.inspection.routing import TOP_STATES, LayerRouting
from nsm_core.inspection.routing_capture import Capture, Kind, capture, has_states
from nsm_core.loaded_model import SequenceModel
from nsm_core.model.nsm import NsmModel
from nsm_core.state.spec import POSITION, State


class RoutingProbe:
    """Reads tokens with the eager model, whichever executor serves it. The figures are those of the eager operations.

    Not thread-safe.
    """

    def __init__(self, model: NsmModel) -> None:
        self._model = model
        self._layers = [layer for layer in hookable_layers(model) if has_states(layer)]

    @torch.inference_mode()
    def capture(self, state: State, ids: Sequence[Sequence[int]]) -> list[tuple[LayerRouting, ...]]:
        """The routing of the last token of ids[i] (at least one), read on top of the others and row i of `state`.

        `state` [B, *shape] is not modified. Layers without routed states are left out.
        """
        is_on_cpu = state[POSITION].device.type == "cpu"
        with one_thread() if is_on_cpu else contextlib.nullcontext():
            return self._capture(state, ids)

    def _capture(self, state: State, ids: Sequence[Sequence[int]]) -> list[tuple[LayerRouting, ...]]:
        device = state[POSITION].device
        for row, tokens in enumerate(ids):
            if len(tokens) > 1:
                state = self._read(state, row, torch.tensor([list(tokens[:-1])], device=device))
        clear_hooked(self._layers)
        with hooked(self._layers):
            self._model.peek(torch.tensor([tokens[-1] for tokens in ids], device=device), state)
        captured = [(layer.name, capture(layer, layer.state_of(state), state[POSITION])) for layer in self._layers]
        clear_hooked(self._layers)
        known = [(name, seen) for name, seen in captured if seen is not None]
        return [tuple(_describe(name, seen, row) for name, seen in known) for row in range(len(ids))]

    def _read(self, state: State, row: int, ids: Tensor) -> State:
        _, after = self._model.forward(ids, {name: value[row : row + 1] for name, value in state.items()})
        joined = {name: value.clone() for name, value in state.items()}
        for name, value in after.items():
            joined[name][row] = value[0]
        return joined


def probe_of(model: SequenceModel) -> RoutingProbe | None:
    """None of an architecture that routes no tokens: its requests cannot ask for routing."""
    return RoutingProbe(model) if isinstance(model, NsmModel) else None


def _describe(name: str, seen: Capture, row: int) -> LayerRouting:
    if seen.write is None or seen.read is None:
        raise ValueError(f"layer {name} has no routed states")
    return layer_routing(name, seen.kind, seen.write[row].cpu(), seen.read[row].cpu())


def layer_routing(name: str, kind: Kind, write: Tensor, read: Tensor) -> LayerRouting:
    """Of one token in one layer, by its weights [H, M]."""
    entropy = write_entropy(write)
    num_heads, num_states = write.shape
    return LayerRouting(
        layer=name,
        kind=kind,
        num_states=num_states,
        num_heads=num_heads,
        entropy=_rounded(float(entropy.mean()) / math.log(max(2, num_states))),
        states_per_token=_rounded(float(states_written(write).mean())),
        write=_largest(write.sum(dim=0)),
        read=_largest(read.sum(dim=0)),
    )


def write_entropy(write: Tensor) -> Tensor:
    """write [..., M] -> entropy [...] in nats of each head's weights as shares; 0 where nothing is written."""
    total = write.sum(dim=-1, keepdim=True)
    shares = write / total.where(total > 0, torch.ones_like(total))
    entropy: Tensor = torch.special.entr(shares).sum(dim=-1)
    return entropy


def states_written(write: Tensor) -> Tensor:
    """write [..., M] -> effective number of states written to [...]: exp of the entropy, 0 if nothing is written."""
    return write_entropy(write).exp() * (write.sum(dim=-1) > 0)


def _largest(weights: Tensor) -> tuple[tuple[int, float], ...]:
    """(state, weight) of the largest of weights [M]. Weights that round to 0 are left out; ties go by number."""
    largest, states = weights.sort(descending=True, stable=True)
    pairs = zip(states[:TOP_STATES].tolist(), map(_rounded, largest[:TOP_STATES].tolist()), strict=True)
    return tuple(pair for pair in pairs if pair[1] > 0)


def _rounded(value: float) -> float:
    return round(value, 4)
