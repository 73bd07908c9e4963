"""Samples the use of a model's routed states for a few tokens, every few seconds."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from nsm_core.loaded_model import SequenceModel
from nsm_core.model.keyed import KeyedMixer
from nsm_core.model.nsm import NsmModel
from nsm_core.model.router import Router
from nsm_core.state.inspection import UNTOUCHED
from nsm_core.state.spec import POSITION, State
from nsm_core.stats import LayerStats

OBSERVE_EVERY_S = 5.0
MAX_SHARE = 0.004  # of all time, however expensive a sample is
MAX_ROWS = 4
UNUSED_WEIGHT = 1e-3


@dataclasses.dataclass(slots=True)
class _Layer:
    """`name`: in LayerStats and in the state's tensors. `source`: tells the write weights. `used_at_start` [H, M] bool:
    slots in use at a text's start; none in layers whose slots count as used once they leave their start.
    """

    name: str
    source: Router | KeyedMixer
    used_at_start: Tensor
    num_allocated: int = 0
    num_pruned: int = 0


class ModelObserver:
    """Repeats one step of the model beside the running ones and records what it writes to slots. Not thread-safe.

    `clock`: in seconds. A sample is due every few seconds, more rarely if samples are expensive.
    """

    def __init__(self, model: NsmModel, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_observed = 0
        self.layers: tuple[LayerStats, ...] = ()
        self._model = model
        self._clock = clock
        self._due_at = clock()
        with torch.inference_mode():
            initial = model.initial_state(1)
        self._layers = [
            _Layer(name, source, _used_at_start(initial, name))
            for name, source in _sources(model)
            if f"layers.{name}.slots" in initial
        ]
        self._used: dict[str, list[Tensor]] = {}  # by request: the slots in use at the last sample

    @property
    def is_due(self) -> bool:
        return bool(self._layers) and self._clock() >= self._due_at

    @torch.inference_mode()
    def observe(
        self, request_ids: Sequence[str], *, is_fresh: Sequence[bool], ids: Sequence[int], state: State
    ) -> None:
        """Requests whose next tokens are `ids`, on top of `state` [B, *shape], which stays as it is.

        `is_fresh`: whether a request began with the learned start.
        """
        began = self._clock()
        weights: dict[str, Tensor] = {}
        with self._watching(weights, state):
            self._model.peek(torch.tensor(ids, dtype=torch.int64, device=self._layers[0].used_at_start.device), state)
        initial = self._model.initial_state(1)  # not stored: it takes megabytes
        names = [f"layers.{layer.name}.slots" for layer in self._layers]
        moved = [_moved(state[name], initial[name][0]) for name in names]
        active = [_active(state, layer.name) for layer in self._layers]
        used = [own if mask is None else mask for own, mask in zip(moved, active, strict=True)]
        self._count_changes(request_ids, is_fresh, used)
        self.layers = tuple(
            _figures(layer, weights[layer.name], share, mask)
            for layer, share, mask in zip(self._layers, moved, active, strict=True)
        )
        self.num_observed += len(ids)
        now = self._clock()
        self._due_at = now + max(OBSERVE_EVERY_S, (now - began) / MAX_SHARE)

    @contextlib.contextmanager
    def _watching(self, weights: dict[str, Tensor], state: State) -> Iterator[None]:
        """Records each layer's write weights [B, H, M] in `weights`, of a step on top of `state`."""
        given: list[tuple[str, KeyedMixer, Tensor]] = []

        def of_router(name: str) -> Callable[..., None]:
            def keep(router: Router, given: object, log_decay: Tensor) -> None:
                weights[name] = -torch.expm1(log_decay)

            return keep

        def of_keys(name: str, mixer: KeyedMixer) -> Callable[..., None]:
            return lambda project, inputs: given.append((name, mixer, inputs[0]))

        with contextlib.ExitStack() as stack:
            for layer in self._layers:
                if isinstance(layer.source, Router):
                    handle = layer.source.register_forward_hook(of_router(layer.name))
                else:
                    handle = layer.source.project.register_forward_pre_hook(of_keys(layer.name, layer.source))
                stack.callback(handle.remove)
            yield
        for name, mixer, x in given:  # after the hooks: this projects once more
            weights[name], _ = mixer.shares(x, state[f"layers.{name}.conv_tail"], state[POSITION])

    def _count_changes(self, request_ids: Sequence[str], is_fresh: Sequence[bool], used: Sequence[Tensor]) -> None:
        """Compares with the last sample, or with the start. The first sample of a resumed state counts no change."""
        seen: dict[str, list[Tensor]] = {}
        for row, request_id in enumerate(request_ids):
            now = [layer[row] for layer in used]
            before = self._used.get(request_id)
            if before is None:
                before = [layer.used_at_start for layer in self._layers] if is_fresh[row] else now
            for layer, was, is_now in zip(self._layers, before, now, strict=True):
                layer.num_allocated += int((is_now & ~was).sum())
                layer.num_pruned += int((was & ~is_now).sum())
            seen[request_id] = now
        self._used = seen


def observer_of(model: SequenceModel) -> ModelObserver | None:
    """None of an architecture without routers."""
    return ModelObserver(model) if isinstance(model, NsmModel) else None


def _sources(model: NsmModel) -> Iterator[tuple[str, Router | KeyedMixer]]:
    """With the names of their layers; one of several mixers of a layer has its number behind the layer's."""
    for number, block in enumerate(model.layers):
        for path, module in block.mixer.named_modules():
            source = module if isinstance(module, KeyedMixer) else getattr(module, "router", None)
            if isinstance(source, Router | KeyedMixer):
                yield ".".join((str(number), *(part for part in path.split(".") if part.isdigit()))), source


def _moved(slots: Tensor, start: Tensor) -> Tensor:
    """slots [B, H, M, 2K], start [H, M, 2K] -> bool [B, H, M]."""
    moved: Tensor = (slots - start).norm(dim=-1) > UNTOUCHED * start.norm(dim=-1)
    return moved


def _active(state: State, name: str) -> Tensor | None:
    """[B, H, M] bool of a layer that allocates; None: of any other."""
    active = state.get(f"layers.{name}.active")
    return None if active is None else active > 0.5


def _used_at_start(initial: State, name: str) -> Tensor:
    active = _active(initial, name)
    return torch.zeros_like(initial[f"layers.{name}.slots"][0, ..., 0]).bool() if active is None else active[0]


def _figures(layer: _Layer, weights: Tensor, moved: Tensor, active: Tensor | None) -> LayerStats:
    """weights [B, H, M], moved and active [B, H, M] bool."""
    total = weights.sum(dim=-1, keepdim=True)
    shares = weights / total.where(total > 0, torch.ones_like(total))
    entropy = torch.special.entr(shares).sum(dim=-1)
    num_slots = weights.shape[-1]
    return LayerStats(
        layer=layer.name,
        entropy=float(entropy.mean()) / math.log(max(2, num_slots)),
        sparsity=float((weights < UNUSED_WEIGHT).float().mean()),
        states_per_token=float((entropy.exp() * (total[..., 0] > 0)).mean()),
        openness=float(weights.mean()),
        utilisation=float(moved.float().mean()),
        num_active=float(num_slots if active is None else active.sum(dim=-1).float().mean()),
        num_allocated=layer.num_allocated,
        num_pruned=layer.num_pruned,
    )
