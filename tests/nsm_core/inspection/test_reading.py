from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nsm_core.errors import InvalidRequest
from nsm_core.inspection.figures import token_figures
from nsm_core.inspection.reading import MAX_TOKENS, inspect
from nsm_core.inspection.routing_capture import STATES
from nsm_core.model.nsm import NsmModel
from nsm_core.state.spec import State
from tests.support.models import random_model, small_config

IDS = torch.randint(64, (70,), generator=torch.Generator().manual_seed(5)).tolist()


def state_after(model: NsmModel, ids: list[int]) -> State:
    with torch.inference_mode():
        return model(torch.tensor([ids]), model.initial_state(1))[1]


@pytest.mark.parametrize("pattern", ["NWL", "CG(NW)", "A[NL]", "MWN", "KWN"])
def test_every_kind_of_layer_tells_what_it_has(pattern: str) -> None:
    model = random_model(small_config(64, layer_pattern=pattern, num_layers=3, gate_chunk=8, communication_interval=64))
    inspection = inspect(model, IDS)
    kinds = {
        "N": "slots",
        "C": "slots",
        "K": "keyed",
        "G": "gated",
        "M": "memory",
        "W": "attention",
        "A": "attention",
        "L": "recurrence",
    }
    letters = [letter for letter in pattern if letter.isalpha()]
    assert [layer.kind for layer in inspection.layers[: len(letters)]] == [kinds[letter] for letter in letters]
    for layer in inspection.layers:
        has = {name: getattr(layer, name) is not None for name in ("write", "read", "seen", "trajectory", "usage")}
        assert has == {
            "write": layer.kind != "attention",
            "read": layer.kind in STATES,
            "seen": layer.kind in ("attention", "gated"),
            "trajectory": layer.kind in STATES,
            "usage": layer.kind == "memory",
        }


@pytest.mark.parametrize("pattern", ["N", "C", "G", "K"])
def test_the_end_is_the_state_of_one_run_and_the_path_leads_there(pattern: str) -> None:
    model = random_model(small_config(64, layer_pattern=pattern, gate_chunk=8, communication_interval=64))
    name = "gated" if pattern == "G" else "slots"
    first, second = inspect(model, IDS, paths_of=["1"]).layers
    wanted = state_after(model, IDS)
    for layer in (first, second):
        torch.testing.assert_close(layer.trajectory.end, wanted[f"layers.{layer.name}.{name}"][0], rtol=1e-4, atol=1e-5)
    assert first.trajectory.path is None
    trajectory, path = second.trajectory, second.trajectory.path
    assert torch.equal(path[-1], trajectory.end)
    start = model.initial_state(1)[f"layers.1.{name}"][0]
    assert torch.equal(trajectory.begin, start)
    length = start.norm(dim=-1) if start.any() else torch.ones(start.shape[:-1])  # keyed slots start empty
    torch.testing.assert_close(trajectory.moved, (path - start).norm(dim=-1) / length)
    changes = torch.diff(torch.cat((start[None], path)), dim=0)
    torch.testing.assert_close(trajectory.change, changes.norm(dim=-1) / length, rtol=1e-4, atol=1e-6)
    cosine = torch.cosine_similarity(changes[1:], changes[:-1], dim=-1)
    is_change = (changes[1:].norm(dim=-1) > 0) & (changes[:-1].norm(dim=-1) > 0)
    torch.testing.assert_close(trajectory.turn[1:][is_change], cosine[is_change], rtol=1e-3, atol=1e-4)
    assert bool(trajectory.turn[1:][~is_change].isnan().all())


def test_a_text_on_top_of_a_state_goes_on_as_the_whole_text() -> None:
    model = random_model(small_config(64, layer_pattern="CGW", num_layers=3, gate_chunk=8, communication_interval=64))
    whole, state = inspect(model, IDS), state_after(model, IDS[:30])
    before = {name: value.clone() for name, value in state.items()}
    rest = inspect(model, IDS[30:], state)
    assert rest.position == 30
    for one, other in zip(rest.layers, whole.layers, strict=True):
        for name in ("write", "read", "seen"):
            if getattr(one, name) is not None:
                torch.testing.assert_close(getattr(one, name), getattr(other, name)[30:], rtol=1e-3, atol=1e-5)
    assert all(torch.equal(before[name], state[name]) for name in state)
    assert list(rest.layers[0].exchanges) == [33]  # after token 64 of the text


def test_an_exchange_is_told_as_what_states_are_made_of_then() -> None:
    model = random_model(small_config(64, layer_pattern="C", num_layers=1, communication_interval=64))
    inputs: list[Tensor] = []
    handle = model.layers[0].mixer.communication.register_forward_hook(lambda _m, args, _out: inputs.append(args[0][0]))
    (layer,) = inspect(model, IDS, paths_of=["0"]).layers
    handle.remove()
    ((token, mix),) = layer.exchanges.items()
    assert token == 63
    torch.testing.assert_close(mix.sum(-1), torch.ones(2, 8))
    torch.testing.assert_close(mix @ inputs[0], layer.trajectory.path[63])


def test_a_memory_is_written_when_a_chunk_is_whole_wherever_the_text_was_cut() -> None:
    config = small_config(64, layer_pattern="M", num_layers=1, gate_chunk=8, memory_rows=12, memory_width=16)
    model = random_model(config)
    (layer,) = inspect(model, IDS).layers
    assert layer.write.any(dim=2)[:, 0].nonzero().flatten().tolist() == list(range(7, 70, 8))
    (rest,) = inspect(model, IDS[30:], state_after(model, IDS[:30])).layers
    for name in ("write", "read", "usage"):
        torch.testing.assert_close(getattr(rest, name), getattr(layer, name)[30:], rtol=1e-3, atol=1e-5)
    figures = token_figures(layer)
    assert float(figures.states_per_token[0].max()) == 0 < 1 < float(figures.states_per_token[7].min()) <= 12


def test_figures_of_an_untouched_state_are_nothing() -> None:
    model = random_model(small_config(64, layer_pattern="N", num_layers=1, write_top_k=1))
    (layer,) = inspect(model, IDS[:1]).layers
    assert int((layer.write[0] > 0).sum()) == 2  # one in each head
    assert torch.equal(layer.trajectory.at_start[0], layer.write[0] == 0)
    assert bool((layer.trajectory.moved[0][layer.write[0] == 0] == 0).all())


@pytest.mark.parametrize("num_tokens", [0, MAX_TOKENS + 1])
def test_a_text_of_no_tokens_or_too_many_is_refused(num_tokens: int) -> None:
    with pytest.raises(InvalidRequest, match=f"1 to {MAX_TOKENS} tokens"):
        inspect(random_model(small_config(64)), [0] * num_tokens)


def test_a_layer_that_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="one of 0, 1, got '7'"):
        inspect(random_model(small_config(64)), [1]).layer("7")
