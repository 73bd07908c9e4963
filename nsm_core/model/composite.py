"""Several mixers in one layer: side by side on the same input, or one after the other before the feed-forward part."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsm_core.config import ModelConfig
from nsm_core.model.mixer import Mixer
from nsm_core.model.segments import Segments
from nsm_core.state.spec import State

_Run = Callable[[Mixer, Tensor, State], tuple[Tensor, State]]


class CompositeMixer(Mixer):
    """Carries the states of its parts as `<index>.<name>`."""

    def __init__(self, config: ModelConfig, mixers: Sequence[Mixer]) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.mixers = nn.ModuleList(mixers)

    @property
    def parts(self) -> list[Mixer]:
        return [mixer for mixer in self.mixers if isinstance(mixer, Mixer)]

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = [mixer.state_shapes() for mixer in self.parts]
        return {f"{index}.{name}": shape for index, part in enumerate(shapes) for name, shape in part.items()}

    def initial_state(self, batch_size: int) -> State:
        return _joined([mixer.initial_state(batch_size) for mixer in self.parts])

    @abc.abstractmethod
    def _combine(self, x: Tensor, state: State, run: _Run) -> tuple[Tensor, State]:
        """`run(mixer, x, its state)` gives a part's output and new state."""

    def forward(self, x: Tensor, state: State, segments: Segments) -> tuple[Tensor, State]:
        return self._combine(x, state, lambda mixer, part, own: mixer(part, own, segments))

    def step(self, x: Tensor, state: State, positions: Tensor) -> tuple[Tensor, State]:
        return self._combine(x, state, lambda mixer, part, own: mixer.step(part, own, positions))


class ParallelMixer(CompositeMixer):
    """The sum of the parts' outputs for the same input, each normed and weighted by channel."""

    def __init__(self, config: ModelConfig, mixers: Sequence[Mixer]) -> None:
        super().__init__(config, mixers)
        self.weights = nn.Parameter(torch.zeros(len(mixers), config.d_model))  # nothing at the start
        # A mixer by itself says nothing at the start. Between two zeros no gradient would ever pass.
        for module in (module for mixer in mixers for name, module in mixer.named_modules() if name == "out"):
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)

    def _combine(self, x: Tensor, state: State, run: _Run) -> tuple[Tensor, State]:
        total, states = torch.zeros_like(x), []
        for index, mixer in enumerate(self.parts):
            out, own = run(mixer, x, _own(state, index))
            total = total + self.weights[index].to(out.dtype) * F.rms_norm(out, (out.shape[-1],), eps=self.eps)
            states.append(own)
        return total, _joined(states)


class SequentialMixer(CompositeMixer):
    """The parts one after the other, each with a residual connection and a norm in front of all but the first."""

    def __init__(self, config: ModelConfig, mixers: Sequence[Mixer]) -> None:
        super().__init__(config, mixers)
        norms = [nn.RMSNorm(config.d_model, eps=config.norm_eps) for _ in mixers[1:]]
        self.norms = nn.ModuleList([nn.Identity(), *norms])  # the layer has normed its input

    def _combine(self, x: Tensor, state: State, run: _Run) -> tuple[Tensor, State]:
        hidden, states = x, []
        for index, (mixer, norm) in enumerate(zip(self.parts, self.norms, strict=True)):
            out, own = run(mixer, norm(hidden), _own(state, index))
            hidden = hidden + out
            states.append(own)
        return hidden - x, _joined(states)


def _own(state: State, index: int) -> State:
    prefix = f"{index}."
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def _joined(states: Sequence[State]) -> State:
    return {f"{index}.{name}": value for index, part in enumerate(states) for name, value in part.items()}
