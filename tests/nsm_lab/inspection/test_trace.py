"""Shares of a trace against the model itself: one value that is written a little differently, and what is read then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nsm_core.errors import InvalidRequest
from nsm_core.inspection.reading import inspect
from nsm_core.model.nsm import NsmModel
from nsm_lab.inspection.trace import LayerTrace, trace
from tests.support.models import random_model, small_config

IDS = torch.randint(64, (72,), generator=torch.Generator().manual_seed(6)).tolist()
HEAD_DIM = 16


def read_of(model: NsmModel, ids: list[int], token: int) -> Tensor:
    """What the only layer reads at the token, [H,K]: its states' weights, and what they held when they were read."""
    values: list[Tensor] = []
    handle = model.layers[0].mixer.conv.register_forward_hook(lambda _m, _g, made: values.append(made[2][0, 0]))
    (layer,) = inspect(model, ids[: token + 1], paths_of=["0"]).layers
    handle.remove()
    before = layer.trajectory.path[token - 1] if token else layer.trajectory.begin
    held = torch.lerp(
        before[..., HEAD_DIM:], values[token][:, None].expand(2, 8, HEAD_DIM), layer.write[token][..., None]
    )
    return torch.einsum("hm,hmk->hk", layer.read[token], held)


def read_with_another_value(model: NsmModel, at: int, token: int, change: Tensor) -> Tensor:
    """The same where token `at` writes a value that differs by `change` [H,K]."""
    number = 0

    def hook(_module: object, _given: object, made: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        nonlocal number
        q, k, v, tail = made
        changed = v + change if number % (token + 1) == at else v
        number += 1
        return q, k, changed, tail

    handle = model.layers[0].mixer.conv.register_forward_hook(hook)
    try:
        return read_of(model, IDS, token)
    finally:
        handle.remove()


def trace_of(model: NsmModel, token: int) -> LayerTrace:
    (found,) = trace(inspect(model, IDS), token)
    return found


CASES: dict[str, dict[str, Any]] = {
    "sigmoid": {"router": "sigmoid", "write_top_k": 8},
    "softmax": {"router": "softmax", "write_top_k": 3},
    "two-levels": {"layer_pattern": "C", "communication_interval": 64, "upper_slots": 2},
    "allocating": {"layer_pattern": "C", "communication_interval": 64, "allocation": True, "start_slots": 4},
    "communicating": {"layer_pattern": "C", "communication_interval": 64, "router": "sigmoid", "write_top_k": 8},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("at", "token"), [(3, 9), (60, 70), (63, 64)])
def test_a_share_is_how_much_of_a_change_to_a_value_arrives(case: str, at: int, token: int) -> None:
    model = random_model(small_config(64, num_layers=1, **CASES[case]))
    change = torch.randn(2, HEAD_DIM, generator=torch.Generator().manual_seed(7))
    arrived = read_with_another_value(model, at, token, change) - read_of(model, IDS, token)
    wanted = trace_of(model, token).heads[:, at, None] * change
    torch.testing.assert_close(arrived, wanted, rtol=2e-3, atol=2e-5)


@pytest.mark.parametrize("pattern", ["N", "C", "W", "G", "L"])
@pytest.mark.parametrize("token", [0, 23, 71])
def test_all_shares_are_one(pattern: str, token: int) -> None:
    model = random_model(small_config(64, num_layers=1, layer_pattern=pattern, gate_chunk=8, communication_interval=64))
    found = trace_of(model, token)
    assert found.heads.shape[1] == token + 1
    torch.testing.assert_close(found.heads.sum(-1) + found.before, torch.ones_like(found.before), rtol=1e-4, atol=1e-5)
    assert bool((found.heads > -1e-6).all())
    assert found.is_exact == (pattern != "G")
    if found.by_state is not None:
        read_itself = 0 if found.kind == "slots" else found.tokens - found.by_state.sum(0)
        torch.testing.assert_close(found.by_state.sum(0) + read_itself, found.tokens, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("pattern", ["N", "C", "W", "G"])
def test_a_text_on_top_of_a_state_traces_as_the_whole_text(pattern: str) -> None:
    model = random_model(small_config(64, num_layers=1, layer_pattern=pattern, gate_chunk=8, communication_interval=64))
    with torch.inference_mode():
        _, state = model(torch.tensor([IDS[:29]]), model.initial_state(1))
    (whole,) = trace(inspect(model, IDS), 70)
    (rest,) = trace(inspect(model, IDS[29:], state), 41)
    torch.testing.assert_close(rest.heads, whole.heads[:, 29:], rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(rest.before, whole.before + whole.heads[:, :29].sum(-1), rtol=1e-3, atol=1e-5)


def test_a_recurrences_shares_are_the_mean_over_channels() -> None:
    model = random_model(small_config(64, num_layers=1, layer_pattern="L"))
    inspection = inspect(model, IDS[:9])
    (found,) = trace(inspection, 8)
    move = inspection.layers[0].write[:, 0]  # [T,d]
    for at in range(9):
        wanted = (move[at] * (1 - move[at + 1 :]).prod(dim=0)).mean()
        assert float(found.tokens[at]) == pytest.approx(float(wanted), rel=1e-4)


def test_tokens_in_the_window_are_read_themselves() -> None:
    model = random_model(small_config(64, num_layers=1, layer_pattern="W", window=24))
    found = trace_of(model, 60)
    assert int((found.tokens > 0).sum()) == 25
    assert float(found.before.sum()) == 0


def test_a_token_that_the_text_does_not_have_is_refused() -> None:
    inspection = inspect(random_model(small_config(64)), [1, 2, 3])
    with pytest.raises(InvalidRequest, match=r"token must be in \[0, 2\]"):
        trace(inspection, 3)
