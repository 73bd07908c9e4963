"""Reads a text token by token and records as tensors how its tokens changed the states of every layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from nsm_core.errors import InvalidRequest
from nsm_core.inspection.layer_hooks import HookedLayer, clear_hooked, hookable_layers, hooked
from nsm_core.inspection.routing_capture import STATES, Capture, Kind, capture
from nsm_core.model.communicating import Communication
from nsm_core.model.gated import GatedMixer
from nsm_core.model.nsm import NsmModel
from nsm_core.state.spec import POSITION, State

MAX_TOKENS = 4096  # of one text: each is a step of the model


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateTrajectory:
    """The states of a layer over a text, on the CPU. Distances are relative to the length of the learned start; of a
    start of zeros, which keyed slots have, they are distances.

    `begin`, `end` [H,M,D]: before the first token and after the last. `moved` [T,H,M]: distance from the learned
    start over its length, after each token. `change` [T,H,M]: how far the token moved it, over the same length.
    `turn` [T,H,M]: cosine between this change and the one before; NaN if one of them is zero. `at_start` [T,H,M]:
    whether the state equals the learned start, to the bit. `path` [T,H,M,D]: the states after each token, if requested.
    """

    begin: Tensor
    end: Tensor
    moved: Tensor
    change: Tensor
    turn: Tensor
    at_start: Tensor
    path: Tensor | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerActivity:
    """One layer, or one of several mixers in it; see Capture for `write`, `read` and `seen`, here [T,H,...], and
    `usage` [T,M]. The states of a memory are those of one head.

    `exchanges`: token -> the communication after it as a matrix [H,M,M]. Row m holds the share of every old state in
    the new state m and sums to 1. `chunk`: tokens between two boundaries of a gated layer. `carried` [H,M]: routed to
    its states since the last boundary before the text.
    """

    name: str
    kind: Kind
    write: Tensor | None
    read: Tensor | None
    seen: Tensor | None
    trajectory: StateTrajectory | None
    exchanges: Mapping[int, Tensor]
    chunk: int | None
    carried: Tensor | None
    usage: Tensor | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """A text of `ids`, read on top of `position` tokens. `skipped`: names of layers without routed states."""

    ids: tuple[int, ...]
    position: int
    layers: tuple[LayerActivity, ...]
    skipped: tuple[str, ...] = ()

    def layer(self, name: str) -> LayerActivity:
        """Raises InvalidRequest for an unknown name."""
        for layer in self.layers:
            if layer.name == name:
                return layer
        names = ", ".join(layer.name for layer in self.layers)
        raise InvalidRequest(f"layer must be one of {names}, got {name!r}", param="layer")


@torch.inference_mode()
def inspect(
    model: NsmModel,
    ids: Sequence[int],
    state: State | None = None,
    *,
    paths_of: Collection[str] = (),
    progress: Callable[[int], None] = lambda num_read: None,
) -> Inspection:
    """Reads ids (1 to MAX_TOKENS) on top of `state` [1, *shape], None: from the start. `state` is not modified.

    `paths_of`: names of layers whose states are recorded after every token (H * M * D * 4 bytes each). `progress` gets
    the number of tokens read, after each token. Layers of unknown kinds are only named.

    Raises InvalidRequest.
    """
    if not 1 <= len(ids) <= MAX_TOKENS:
        raise InvalidRequest(f"a text must have 1 to {MAX_TOKENS} tokens to be inspected, got {len(ids)}", param="text")
    start = model.initial_state(1)
    state = start if state is None else state
    position, device = int(state[POSITION][0]), start[POSITION].device
    layers = hookable_layers(model)
    records = [_Record(layer, state, start, records_path=layer.name in paths_of) for layer in layers]
    with hooked(layers):
        for num_read, token_id in enumerate(ids, start=1):
            clear_hooked(layers)
            _, after = model.step(torch.tensor([token_id], device=device), state)
            for record in records:
                record.add(state, after)
            state = after
            progress(num_read)
    clear_hooked(layers)
    activities = {layer.name: record.activity() for layer, record in zip(layers, records, strict=True)}
    return Inspection(
        ids=tuple(ids),
        position=position,
        layers=tuple(activity for activity in activities.values() if activity is not None),
        skipped=tuple(name for name, activity in activities.items() if activity is None),
    )


class _Record:
    """Records one layer while the text is read."""

    def __init__(self, layer: HookedLayer, begin: State, start: State, *, records_path: bool) -> None:
        self._layer = layer
        self._captures: list[Capture] = []
        self._exchanges: dict[int, Tensor] = {}
        self._states: _States | None = None
        own, learned = layer.state_of(begin), layer.state_of(start)
        name = next((name for name in STATES.values() if name in own), None)
        if name is not None:
            self._states = _States(name, own, learned, records_path=records_path)
        self._carried = own["weights"][0].float().cpu() if isinstance(layer.mixer, GatedMixer) else None

    def add(self, before: State, after: State) -> None:
        seen = capture(self._layer, self._layer.state_of(before), before[POSITION])
        if seen is None:
            return
        self._captures.append(seen)
        if self._states is not None:
            self._states.add(self._layer.state_of(after))
        communication = self._communication()
        if communication is not None and "communication" in self._layer.inputs:
            self._exchanges[len(self._captures) - 1] = _mix(communication, self._layer)[0].float().cpu()

    def activity(self) -> LayerActivity | None:
        if not self._captures:
            return None
        mixer = self._layer.mixer
        return LayerActivity(
            name=self._layer.name,
            kind=self._captures[0].kind,
            write=_stacked([one.write for one in self._captures]),
            read=_stacked([one.read for one in self._captures]),
            seen=_stacked([one.seen for one in self._captures]),
            usage=_stacked([one.usage for one in self._captures]),
            trajectory=None if self._states is None else self._states.trajectory(),
            exchanges=self._exchanges,
            chunk=mixer.chunk if isinstance(mixer, GatedMixer) else None,
            carried=self._carried,
        )

    def _communication(self) -> Communication | None:
        found = getattr(self._layer.mixer, "communication", None)
        return found if isinstance(found, Communication) else None


class _States:
    """Follows the states of one layer from token to token: their figures, and the states themselves if requested."""

    def __init__(self, name: str, begin: State, start: State, *, records_path: bool) -> None:
        self._name = name
        self._begin = self._last = self._of(begin)
        self._start = self._of(start)
        length = self._start.norm(dim=-1)
        self._length = length.where(length > 0, torch.ones_like(length))
        self._changed = torch.zeros_like(self._begin)
        self._path: list[Tensor] | None = [] if records_path else None
        self._figures: list[Tensor] = []
        self._at_start: list[Tensor] = []

    def add(self, own: State) -> None:
        now = self._of(own)
        changed = now - self._last
        distances = torch.stack(((now - self._start).norm(dim=-1), changed.norm(dim=-1))) / self._length
        both = changed.norm(dim=-1) * self._changed.norm(dim=-1)
        turn = (changed * self._changed).sum(dim=-1) / both.where(both > 0, torch.nan)
        self._figures.append(torch.cat((distances, turn[None])).float().cpu())
        self._at_start.append((now == self._start).all(dim=-1).cpu())
        if self._path is not None:
            self._path.append(now.float().cpu())
        self._last, self._changed = now, changed

    def _of(self, own: State) -> Tensor:
        """The states [H,M,D] of the batch's only row."""
        states = own[self._name]
        return states if states.dim() == 3 else states[0]  # a memory's rows: one head

    def trajectory(self) -> StateTrajectory:
        moved, change, turn = torch.stack(self._figures).unbind(dim=1)
        return StateTrajectory(
            begin=self._begin.float().cpu(),
            end=self._last.float().cpu(),
            moved=moved,
            change=change,
            turn=turn,
            at_start=torch.stack(self._at_start),
            path=None if self._path is None else torch.stack(self._path),
        )


def _mix(communication: Communication, layer: HookedLayer) -> Tensor:
    """The communication that a layer has just made, as a matrix [B,H,M,M] on its states.

    It is linear in the values of the states. With the identity matrix as values, the result is the matrix itself.
    """
    keys = layer.inputs["communication"][..., : communication.head_dim]
    own = torch.eye(keys.shape[-2], device=keys.device).expand(*keys.shape[:-1], -1)
    mixed: Tensor = communication(torch.cat((keys, own), dim=-1), *layer.extra_inputs["communication"])
    return mixed[..., communication.head_dim :]


def _stacked(parts: Sequence[Tensor | None]) -> Tensor | None:
    """[T, ...] from parts [1, ...], all or none of which are None."""
    present = [part[0].float().cpu() for part in parts if part is not None]
    return torch.stack(present) if present else None
