"""The plain model: splits, batches, padding and resumption agree, and given states stay as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nsm_core.errors import CheckpointError, ConfigError
from nsm_core.rwkv7.model import Rwkv7Model
from nsm_core.rwkv7.tensors import num_parameters, tensor_shapes
from nsm_core.state.spec import POSITION, State
from tests.support.rwkv7 import random_tensors, small_config

PAGE = Path(__file__).parents[3] / "docs/models.md"
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(scope="module")
def model() -> Rwkv7Model:
    config = small_config(num_layers=3)
    return Rwkv7Model(config, random_tensors(config))


def ids_of(*shape: int, seed: int = 7) -> torch.Tensor:
    return torch.randint(300, shape, generator=torch.Generator().manual_seed(seed))


def assert_close(got: State, want: State) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("split", [1, 7, 64, 96])
def test_any_split_gives_the_same_hidden_vectors_and_state(model: Rwkv7Model, split: int) -> None:
    ids = ids_of(2, 96)
    want, want_state = model.forward(ids, model.initial_state(2))
    state, parts = model.initial_state(2), []
    for part in ids.split(split, dim=1):
        hidden, state = model.forward(part, state)
        parts.append(hidden)
    torch.testing.assert_close(torch.cat(parts, dim=1), want, **CLOSE)
    assert_close(state, want_state)


def test_steps_agree_with_one_reading(model: Rwkv7Model) -> None:
    ids = ids_of(2, 20)
    want, want_state = model.forward(ids, model.initial_state(2))
    state, parts = model.initial_state(2), []
    for column in ids.unbind(dim=1):
        hidden, state = model.step(column, state)
        parts.append(hidden)
    torch.testing.assert_close(torch.stack(parts, dim=1), want, **CLOSE)
    assert_close(state, want_state)


def test_padding_moves_nothing(model: Rwkv7Model) -> None:
    ids, lengths = ids_of(3, 12), torch.tensor([12, 5, 0])
    _, start = model.forward(ids_of(3, 4, seed=8), model.initial_state(3))
    hidden, state = model.forward(ids, start, lengths)
    for row, length in enumerate(lengths.tolist()):
        own = {name: value[row : row + 1] for name, value in start.items()}
        if length > 0:
            alone, own = model.forward(ids[row : row + 1, :length], own)
            torch.testing.assert_close(hidden[row : row + 1, :length], alone, **CLOSE)
        assert_close({name: value[row : row + 1] for name, value in state.items()}, own)


def test_a_given_state_stays_as_it_is(model: Rwkv7Model) -> None:
    _, state = model.forward(ids_of(1, 5), model.initial_state(1))
    copy = {name: value.clone() for name, value in state.items()}
    model.forward(ids_of(1, 5), state)
    model.step(ids_of(1), state)
    assert all(torch.equal(state[name], value) for name, value in copy.items())


# docs/models.md
STATE_SIZES = {
    "0.1B": (12, 768, 2.4),
    "0.4B": (24, 1024, 6.5),
    "1.5B": (24, 2048, 13.0),
    "2.9B": (32, 2560, 21.6),
    "7.2B": (32, 4096, 34.6),
    "13.3B": (61, 4096, 66.0),
}


@pytest.mark.parametrize("size", STATE_SIZES)
def test_states_have_the_size_that_the_page_says(size: str) -> None:
    layers, width, megabytes = STATE_SIZES[size]
    config = small_config(vocab_size=65536, width=width, num_layers=layers, head_size=64, hidden=4 * width)
    num_bytes = Rwkv7Model(config, {}).state_spec.num_bytes
    assert num_bytes == 8 + 4 * layers * 66 * width
    assert round(num_bytes / 1e6, 1) == megabytes
    lines = PAGE.read_text("utf-8").splitlines()
    row = next(number for number, line in enumerate(lines) if line.startswith("| state, MB |"))
    sizes, states = ([cell.strip() for cell in line.split("|")] for line in (lines[row - 2], lines[row]))
    assert states[sizes.index(size)] == f"{megabytes:.1f}"


def test_a_state_has_two_tokens_and_a_matrix_in_each_layer() -> None:
    config = small_config(width=768, head_size=64)
    spec = Rwkv7Model(config, {}).state_spec
    assert spec.tensors[0].name == POSITION
    assert [tensor.shape for tensor in spec.tensors[1:4]] == [(768,), (768,), (12, 64, 64)]


def test_parameters_are_counted_without_reading_them() -> None:
    config = small_config()
    assert num_parameters(config) == sum(tensor.numel() for tensor in random_tensors(config).values())


def test_one_layer_needs_no_value_residual() -> None:
    config = small_config(num_layers=1, value_rank=0)
    model = Rwkv7Model(config, random_tensors(config))
    hidden, _ = model.forward(ids_of(1, 3), model.initial_state(1))
    assert bool(hidden.isfinite().all())
    assert "blocks.0.att.v0" not in tensor_shapes(config)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("blocks.1.att.w1", None, "the tensor blocks.1.att.w1 is missing"),
        ("blocks.0.ffn.key.weight", torch.zeros(64, 128), r"blocks.0.ffn.key.weight has the shape \[64, 128\]"),
        ("ln_out.bias", torch.full((64,), torch.nan), "ln_out.bias holds a number that is not finite"),
        ("head.weight", torch.zeros(300, 64, dtype=torch.int8), "head.weight holds torch.int8"),
    ],
)
def test_a_bad_tensor_is_named(name: str, value: torch.Tensor | None, message: str) -> None:
    config = small_config()
    tensors = random_tensors(config)
    del tensors[name]
    if value is not None:
        tensors[name] = value
    with pytest.raises(CheckpointError, match=message):
        Rwkv7Model(config, tensors).weights  # noqa: B018


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"width": 60}, "multiple of head_size"), ({"num_layers": 0}, "num_layers"), ({"value_rank": 0}, "value_rank")],
)
def test_impossible_sizes_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small_config(**changes)
