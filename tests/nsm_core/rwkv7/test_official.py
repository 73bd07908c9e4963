"""The plain model against the official package (PyPI `rwkv`, CPU, fp32) on random weights of three sizes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nsm_core.rwkv7.config import Rwkv7Config
from nsm_core.rwkv7.model import CHANNEL_SHIFT, MATRIX, TIME_SHIFT, Rwkv7Model
from tests.support.rwkv7 import random_tensors, small_config

TOLERANCE = 1e-4
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
    official = _run_official(tmp_path, tensors, ids)
    model = Rwkv7Model(config, tensors)
    hidden, state = model.forward(ids[None], model.initial_state(1))
    assert _difference(model.logits(hidden)[0], official["logits"]) < TOLERANCE
    for layer in range(config.num_layers):
        for name, want in _official_state(official, config, layer).items():
            assert _difference(state[f"layers.{layer}.{name}"][0], want) < TOLERANCE, (layer, name)


def _difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest one, relative to the largest number where that is above 1."""
    return float((got - want).abs().max() / want.abs().max().clamp(min=1.0))


def _official_state(official: dict[str, torch.Tensor], config: Rwkv7Config, layer: int) -> dict[str, torch.Tensor]:
    """In our layout: the official matrices have a row for each value, ours for each key."""
    time_shift, matrix, channel_shift = (official[f"state.{3 * layer + index}"] for index in range(3))
    return {TIME_SHIFT: time_shift, MATRIX: matrix.transpose(-1, -2), CHANNEL_SHIFT: channel_shift}


def _run_official(folder: Path, tensors: dict[str, torch.Tensor], ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model, ids_file, out = folder / "model.pth", folder / "ids.safetensors", folder / "out.safetensors"
    # The first layer's value residual is not read, but the package expects its names
    unused = {f"blocks.0.att.v{index}": torch.zeros(1) for index in range(3)}
    torch.save(tensors | unused, model)  # noqa: TID251 - the format that the package reads
    save_file({"ids": ids}, ids_file)
    script = Path(__file__).with_name("official.py")
    command = [sys.executable, str(script), str(model), str(ids_file), str(out)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return load_file(out)
