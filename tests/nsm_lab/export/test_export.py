"""What is exported says what the model says: in ONNX Runtime and as a saved program, token by token, at any batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor

from nsm_core.errors import ConfigError
from nsm_core.model.loader import load_checkpoint
from nsm_core.model.nsm import NsmModel
from nsm_core.model.storage import WeightFormat, is_rounded, save_model
from nsm_core.state.spec import State
from nsm_core.tokenizer import Tokenizer
from nsm_lab.export.functions import LOGITS, NEW, STEP, StateFunction, output_names, reading, trace
from nsm_lab.export.onnx_file import write_onnx
from nsm_lab.export.write import export_model
from tests.nsm_core.model.recurrence_suite import CONFIG, make_model, with_fields
from tests.nsm_core.model.test_nsm import ALLOCATING, KINDS
from tests.nsm_lab.baselines.patterns import PATTERNS
from tests.support.models import random_model, save_small_model, small_config

TOLERANCE = {"rtol": 1e-4, "atol": 5e-5}  # benchmarks/notes/export.md
NUM_TOKENS = 64
BATCHES = (1, 2, 5)
SMALL = {"gate_chunk": 8, "communication_interval": 64, "memory_rows": 12, "memory_width": 16}
# every kind of layer that ONNX can hold, in few models: an export takes seconds
MODELS: dict[str, dict[str, Any]] = {
    "slots": SMALL | {"layer_pattern": "NC", "num_layers": 2},
    "tokens": SMALL | {"layer_pattern": "LWA", "num_layers": 3},
    "gated": SMALL | {"layer_pattern": "G", "num_layers": 1},
    "memory": SMALL | {"layer_pattern": "M", "num_layers": 1},
    "composites": SMALL | {"layer_pattern": "[NW](CL)", "num_layers": 2, "projector": "hybrid"},
    "baselines": {"layer_pattern": "lfprm", "num_layers": 5},
    "allocating": ALLOCATING | {"layer_pattern": "C", "num_layers": 1},
}
LONG = ("composites", "baselines", "allocating")
Step = Callable[[Tensor, State], tuple[Tensor, State]]


def own(model: NsmModel) -> Step:
    def run(ids: Tensor, state: State) -> tuple[Tensor, State]:
        hidden, state = model.step(ids, state)
        return model.logits(hidden), state

    return run


def in_onnx_runtime(path: Path) -> Step:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(ids: Tensor, state: State) -> tuple[Tensor, State]:
        feeds = {"ids": ids.numpy(), **{name: value.numpy() for name, value in state.items()}}
        names = [output.name for output in session.get_outputs()]
        made = {name: torch.from_numpy(value) for name, value in zip(names, session.run(None, feeds), strict=True)}
        return made[LOGITS], {name: made[NEW + name] for name in state}

    return run


def as_saved(path: Path) -> Step:
    program = torch.export.load(path).module()

    def run(ids: Tensor, state: State) -> tuple[Tensor, State]:
        logits, *new = program(ids, *state.values())
        return logits, dict(zip(state, new, strict=True))

    return run


def staggered(model: NsmModel, rows: int) -> State:
    """Rows at different places of their texts: each has boundaries of its own."""
    states = []
    for row in range(rows):
        ids = torch.arange(1 + 7 * row)[None]
        states.append(model(ids, model.initial_state(1))[1])
    return {name: torch.cat([state[name] for state in states]) for name in states[0]}


def assert_same_text(model: NsmModel, step: Step, rows: int) -> None:
    """Greedy, both with the tokens that they choose themselves."""
    ids, others = torch.arange(rows) + 3, torch.arange(rows) + 3
    state = given = staggered(model, rows)
    for _ in range(NUM_TOKENS):
        logits, state = own(model)(ids, state)
        found, given = step(others, given)
        torch.testing.assert_close(found, logits, **TOLERANCE)
        ids, others = logits.argmax(dim=-1), found.argmax(dim=-1)
        assert torch.equal(ids, others)
    torch.testing.assert_close(given, state, **TOLERANCE)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in MODELS]
)
def test_onnx_and_saved_programs_write_the_models_text_at_any_batch(name: str, tmp_path: Path) -> None:
    model = make_model(with_fields(**MODELS[name]))
    program = trace(model, STEP)
    write_onnx(program, model, tmp_path / "step.onnx", is_int8=False)
    torch.export.save(program, tmp_path / "step.pt2")
    for step in (in_onnx_runtime(tmp_path / "step.onnx"), as_saved(tmp_path / "step.pt2")):
        for rows in BATCHES:
            assert_same_text(model, step, rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*KINDS, *(name for name in PATTERNS if name != "state spaces")])
def test_every_configuration_of_the_property_suites_exports(name: str, tmp_path: Path) -> None:
    model = make_model(with_fields(**{**KINDS, **PATTERNS}[name]))
    write_onnx(trace(model, STEP), model, tmp_path / "step.onnx", is_int8=False)
    for rows in BATCHES:
        assert_same_text(model, in_onnx_runtime(tmp_path / "step.onnx"), rows)


def test_complex_states_are_saved_as_programs_and_refused_as_onnx_by_layer(
    tmp_path: Path, tiny_tokenizer: Tokenizer
) -> None:
    model = make_model(with_fields(layer_pattern="ds", num_layers=2))
    program = trace(model, STEP).module()
    state = staggered(model, 2)
    got = program(torch.tensor([4, 5]), *state.values())
    torch.testing.assert_close(got[0], own(model)(torch.tensor([4, 5]), state)[0], **TOLERANCE)
    loaded = load_checkpoint(save_small_model(tmp_path / "model", tiny_tokenizer, seed=1, layer_pattern="Ns"))
    with pytest.raises(ConfigError, match=r"^layer 1 \(s\) cannot be written as ONNX: S5 computes with complex"):
        export_model(loaded, tmp_path / "out", "onnx")
    assert not (tmp_path / "out").exists()


def test_a_prompt_is_read_at_once_as_token_by_token(tmp_path: Path) -> None:
    model = make_model(with_fields(**SMALL, layer_pattern="C", num_layers=1))
    function = reading(16)
    write_onnx(trace(model, function), model, tmp_path / "read.onnx", is_int8=False)
    read = in_onnx_runtime(tmp_path / "read.onnx")
    for rows in BATCHES:
        state = staggered(model, rows)
        ids = torch.arange(rows * 16).reshape(rows, 16) % CONFIG.vocab_size
        found, given = read(ids, state)
        for column in ids.T:
            logits, state = own(model)(column, state)
        torch.testing.assert_close(found, logits, **TOLERANCE)
        torch.testing.assert_close(given, state, **TOLERANCE)


@pytest.mark.timeout(300)
def test_the_bundled_models_text_is_the_same_in_onnx_runtime(bundled: Path) -> None:
    loaded = load_checkpoint(Path("pulse-books-small"))
    for rows in BATCHES:
        assert_same_text(loaded.model, in_onnx_runtime(bundled / "step.onnx"), rows)


def test_int8_files_hold_an_int8_models_own_numbers(tmp_path: Path, tiny_tokenizer: Tokenizer) -> None:
    made = random_model(small_config(tiny_tokenizer.vocab_size, num_layers=1))
    save_model(made, tiny_tokenizer, tmp_path / "model", WeightFormat.INT8)
    loaded = load_checkpoint(tmp_path / "model")
    export_model(loaded, tmp_path / "out", "onnx", is_int8=True)
    file = tmp_path / "out" / "step.onnx"
    weights = [value for name, value in loaded.model.state_dict().items() if is_rounded(name, value)]
    held = [tensor.dims for tensor in onnx.load(file).graph.initializer if tensor.data_type == onnx.TensorProto.INT8]
    matrices = [dims for dims in held if len(dims) == 2]
    assert sum(map(math.prod, matrices)) == sum(value.numel() for value in weights if value.ndim == 2)
    assert_same_text(loaded.model, in_onnx_runtime(file), 2)


def test_the_functions_names_follow_the_states_layout() -> None:
    model = make_model(with_fields(layer_pattern="N", num_layers=1))
    names = ["logits", "new.position", "new.layers.0.slots", "new.layers.0.conv_tail"]
    assert output_names(model.state_spec) == names
    made = StateFunction(model, STEP)(torch.tensor([1]), *model.initial_state(1).values())
    assert [tuple(value.shape) for value in made] == [(1, 300), (1,), (1, 2, 16, 32), (1, 3, 96)]


def test_a_folder_that_is_not_empty_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("mine")
    with pytest.raises(ConfigError, match="not an empty folder"):
        export_model(load_checkpoint(Path("pulse-books-small")), tmp_path, "torch")
    assert [file.name for file in tmp_path.iterdir()] == ["there"]


def test_initial_states_are_those_of_the_model(tmp_path: Path, tiny_tokenizer: Tokenizer) -> None:
    loaded = load_checkpoint(save_small_model(tmp_path / "model", tiny_tokenizer, seed=1))
    export_model(loaded, tmp_path / "out", "torch")
    with np.load(tmp_path / "out" / "initial_state.npz") as stored:
        for name, value in loaded.model.initial_state(1).items():
            np.testing.assert_array_equal(stored[name], value.numpy())
