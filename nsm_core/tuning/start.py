"""The numbers of a start state that are trained: memory that lasts.

A tuned state stands after the start-of-text token, at position 1. Attention windows, convolution tails and token shifts
are those that this token leaves: they would be gone after a few tokens of any text. Slots and matrices are trained.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsm_core.errors import ConfigError
from nsm_core.loaded_model import LoadedModel, SequenceModel
from nsm_core.state.spec import State, StateSpec

# The last part of the names of tensors that hold the tokens read last
SHORT_LIVED = ("kv", "conv_tail", "time_shift", "channel_shift")


def trained_names(spec: StateSpec) -> tuple[str, ...]:
    """The tensors of a state that are trained. Raises ConfigError for a model without such memory."""
    names = tuple(
        tensor.name
        for tensor in spec.tensors
        if tensor.dtype.is_floating_point and tensor.name.rpartition(".")[2] not in SHORT_LIVED
    )
    if not names:
        raise ConfigError("this model has no memory that lasts: its states cannot be tuned")
    return names


@torch.no_grad()
def after_start_token(loaded: LoadedModel[SequenceModel]) -> State:
    """The state [1, *shape] of a text of which only the start-of-text token was read."""
    model = loaded.model
    ids = torch.tensor([[loaded.tokenizer.end_of_text_id]], device=loaded.device)
    _, state = model.forward(ids, model.initial_state(1))
    return state


def for_rows(state: State, num_rows: int) -> State:
    """The same state for each of `num_rows` rows: [1, *shape] -> [num_rows, *shape], without a copy."""
    return {name: value.expand(num_rows, *value.shape[1:]) for name, value in state.items()}


def largest_magnitude(tensors: dict[str, Tensor]) -> float:
    """The largest absolute value of any number in `tensors`."""
    return max(float(value.detach().abs().max()) for value in tensors.values())
