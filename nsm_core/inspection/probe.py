"""Tells what a token does to the states of a running text, by reading it once more beside the engine's own step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nsm_core.inspection.looks import Look, has_states, look
from nsm_core.inspection.routing import TOP_STATES, LayerRouting
from nsm_core.inspection.watching import forget, layers_of, watching
from nsm_core.model.nsm import NsmModel
from nsm_core.state.spec import POSITION, State


class RoutingProbe:
    """Of one model, as it is written: whichever executor serves it, what is told are the figures of these operations.

    Not thread-safe.
    """

    def __init__(self, model: NsmModel) -> None:
        self._model = model
        self._layers = [layer for layer in layers_of(model) if has_states(layer)]

    @torch.inference_mode()
    def look(self, state: State, ids: Sequence[Sequence[int]]) -> list[tuple[LayerRouting, ...]]:
        """What the last token of ids[i] (at least one) does on top of the others and row i of `state` [B, *shape].

        Layers without routed states are left out. The state stays as it is.
        """
        device = state[POSITION].device
        for row, tokens in enumerate(ids):
            if len(tokens) > 1:
                state = self._read(state, row, torch.tensor([list(tokens[:-1])], device=device))
        forget(self._layers)
        with watching(self._layers):
            self._model.peek(torch.tensor([tokens[-1] for tokens in ids], device=device), state)
        found = [(layer.name, look(layer, layer.state_of(state), state[POSITION])) for layer in self._layers]
        forget(self._layers)
        shown = [(name, seen) for name, seen in found if seen is not None]
        return [tuple(_describe(name, seen, row) for name, seen in shown) for row in range(len(ids))]

    def _read(self, state: State, row: int, ids: Tensor) -> State:
        _, after = self._model.forward(ids, {name: value[row : row + 1] for name, value in state.items()})
        joined = {name: value.clone() for name, value in state.items()}
        for name, value in after.items():
            joined[name][row] = value[0]
        return joined


def _describe(name: str, seen: Look, row: int) -> LayerRouting:
    if seen.write is None or seen.read is None:
        raise ValueError(f"layer {name} has no routed states")
    write, read = seen.write[row].cpu(), seen.read[row].cpu()
    entropy = write_entropy(write)
    num_heads, num_states = write.shape
    return LayerRouting(
        layer=name,
        kind=seen.kind,
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
    """write [..., M] -> [...]: to how many states that amounts, exp of the entropy; 0 where nothing is written."""
    return write_entropy(write).exp() * (write.sum(dim=-1) > 0)


def _largest(weights: Tensor) -> tuple[tuple[int, float], ...]:
    """Of weights [M], without those that round to nothing; the lower number first among equals."""
    largest, states = weights.sort(descending=True, stable=True)
    pairs = zip(states[:TOP_STATES].tolist(), map(_rounded, largest[:TOP_STATES].tolist()), strict=True)
    return tuple(pair for pair in pairs if pair[1] > 0)


def _rounded(value: float) -> float:
    return round(value, 4)
