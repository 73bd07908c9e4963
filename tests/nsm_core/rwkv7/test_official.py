"""The plain model against the official package (PyPI `rwkv`, CPU, fp32), on random weights of three sizes and on
trained ones.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nsm_core.architectures import architecture_of, identify
from nsm_core.execution.base import Executor
from nsm_core.execution.eager import EagerExecutor
from nsm_core.execution.native.library import variants
from nsm_core.execution.native.precision import Precision
from nsm_core.execution.rwkv7.executor import Rwkv7Executor
from nsm_core.execution.rwkv7.weights import Rwkv7Weights
from nsm_core.rwkv7.config import Rwkv7Config
from nsm_core.rwkv7.model import CHANNEL_SHIFT, MATRIX, TIME_SHIFT, Rwkv7Model
from nsm_core.rwkv7.tensors import tensor_shapes
from nsm_core.rwkv7.weights import CheckedTensors
from tests.support.rwkv7 import random_tensors, small_config
from tests.support.samples import sample_texts

TOLERANCE = 1e-4
NUM_GREEDY = 512
TRAINED = Path(__file__).resolve().parents[2] / "assets" / "rwkv7-books"
SIZES = {
    "small": ({"width": 128, "num_layers": 2, "head_size": 64, "hidden": 512}, 200),
    "medium": ({"width": 256, "num_layers": 4, "head_size": 64, "hidden": 1024, "vocab_size": 1000}, 2000),
    "large": ({"width": 768, "num_layers": 12, "head_size": 64, "hidden": 3072, "vocab_size": 4000}, 2000),
}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("size", SIZES)
def test_logits_and_states_agree_with_the_official_package(tmp_path: Path, size: str) -> None:
    sizes, num_tokens = SIZES[size]
    config = small_config(**sizes)
    tensors = random_tensors(config, seed=len(size))
    ids = torch.randint(config.vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(3))
    _assert_agreement(Rwkv7Model(config, tensors), ids, _run_official(tmp_path, tensors, ids))


@pytest.fixture(scope="module")
def trained() -> Rwkv7Model:
    """Weights that were trained on books, as they are after their rounding to int8: in fp32 for both."""
    return architecture_of(TRAINED).load(TRAINED, "cpu").model  # type: ignore[return-value]


@pytest.fixture(scope="module")
def book() -> Tensor:
    tokenizer = identify(TRAINED)[1]
    return torch.tensor([tokenizer.end_of_text_id, *tokenizer.encode(sample_texts("test")[0][:12000])])


@pytest.mark.timeout(1800)
def test_trained_weights_read_a_book_as_the_official_package_does(
    trained: Rwkv7Model, book: Tensor, tmp_path: Path
) -> None:
    ids = book[:2000]
    assert len(ids) == 2000
    official = _run_official(tmp_path, _tensors_of(trained), ids)
    nats = torch.nn.functional.cross_entropy(official["logits"][:-1], ids[1:])
    assert nats < 4.5  # it was trained: an untrained model is at 9
    _assert_agreement(trained, ids, official)


@pytest.mark.timeout(1800)
def test_trained_weights_write_the_official_packages_text(trained: Rwkv7Model, book: Tensor, tmp_path: Path) -> None:
    """The plain model, and the kernels for fp32 where they are built."""
    prompt = book[:200]
    want = _run_official(tmp_path, _tensors_of(trained), prompt, NUM_GREEDY)["greedy"].tolist()
    assert len(want) == NUM_GREEDY
    executors: list[Executor] = [EagerExecutor(trained, num_rows=1)]
    if variants():
        executors.append(Rwkv7Executor(trained, num_rows=1, weights=Rwkv7Weights(trained, Precision.FP32)))
    for executor in executors:
        assert _greedy_ids(executor, prompt.tolist()) == want


def _greedy_ids(executor: Executor, prompt: list[int]) -> list[int]:
    executor.pool.lease(0)
    executor.pool.write(0, executor.initial)
    (hidden,) = executor.read((0,), (prompt,))
    ids = [int(executor.logits(hidden[-1:]).argmax())]
    while len(ids) < NUM_GREEDY:
        ids.append(int(executor.logits(executor.step((0,), ids[-1:])).argmax()))
    return ids


@pytest.mark.skipif(not variants(), reason="the native kernels are not built")
def test_int8_costs_trained_weights_little(trained: Rwkv7Model, book: Tensor) -> None:
    """Bits of a book's tokens on the kernels for int8 and fp32, from the same file."""
    bits = {}
    for precision in (Precision.FP32, Precision.INT8):
        executor = Rwkv7Executor(trained, num_rows=1, weights=Rwkv7Weights(trained, precision))
        executor.pool.lease(0)
        executor.pool.write(0, executor.initial)
        (hidden,) = executor.read((0,), (book[:1000].tolist(),))
        bits[precision] = float(torch.nn.functional.cross_entropy(executor.logits(hidden[:-1]), book[1:1000]))
    assert bits[Precision.INT8] == pytest.approx(bits[Precision.FP32], rel=0.003)


def _tensors_of(model: Rwkv7Model) -> dict[str, Tensor]:
    """All tensors by official name, in fp32 as the model has them."""
    checked = CheckedTensors(model.config, model.tensors)
    return {name: checked[name].reshape(shape) for name, shape in tensor_shapes(model.config).items()}


@torch.inference_mode()
def _assert_agreement(model: Rwkv7Model, ids: Tensor, official: dict[str, Tensor]) -> None:
    hidden, state = model.forward(ids[None], model.initial_state(1))
    assert _difference(model.logits(hidden)[0], official["logits"]) < TOLERANCE
    for layer in range(model.config.num_layers):
        for name, want in _official_state(official, model.config, layer).items():
            assert _difference(state[f"layers.{layer}.{name}"][0], want) < TOLERANCE, (layer, name)


def _difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest one, relative to the largest number where that is above 1."""
    return float((got - want).abs().max() / want.abs().max().clamp(min=1.0))


def _official_state(official: dict[str, torch.Tensor], config: Rwkv7Config, layer: int) -> dict[str, torch.Tensor]:
    """In our layout: the official matrices have a row for each value, ours for each key."""
    time_shift, matrix, channel_shift = (official[f"state.{3 * layer + index}"] for index in range(3))
    return {TIME_SHIFT: time_shift, MATRIX: matrix.transpose(-1, -2), CHANNEL_SHIFT: channel_shift}


def _run_official(
    folder: Path, tensors: dict[str, torch.Tensor], ids: torch.Tensor, num_greedy: int = 0
) -> dict[str, torch.Tensor]:
    model, ids_file, out = folder / "model.pth", folder / "ids.safetensors", folder / "out.safetensors"
    # The first layer's value residual is not read, but the package expects its names
    unused = {f"blocks.0.att.v{index}": torch.zeros(1) for index in range(3)}
    torch.save(tensors | unused, model)  # noqa: TID251 - the format that the package reads
    save_file({"ids": ids}, ids_file)
    script = Path(__file__).with_name("official.py")
    command = [sys.executable, str(script), str(model), str(ids_file), str(out), str(num_greedy)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return load_file(out)
