"""`nsm export`: a folder for other runtimes, or one line that names what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from nsm_core.model.loader import load_checkpoint
from nsm_core.tokenizer import Tokenizer
from nsm_lab.baselines.register import register_baselines
from tests.service.cli.conftest import Nsm, assert_one_line, no_model
from tests.support.models import save_small_model


def test_folder_describes_its_files(nsm: Nsm, model_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = nsm("export", model_dir, "--format", "torch", "--output", out)
    names = ["config.json", "initial_state.npz", "manifest.json", "step.pt2", "tokenizer.json"]
    assert result.exit_code == 0
    assert sorted(file.name for file in out.iterdir()) == names
    assert [line.split(":")[0] for line in result.stderr.splitlines()] == [str(out / name) for name in names]
    loaded, manifest = load_checkpoint(model_dir), json.loads((out / "manifest.json").read_text())
    assert manifest["fingerprint"] == loaded.fingerprint
    assert manifest["start_id"] == loaded.tokenizer.end_of_text_id
    (function,) = manifest["functions"]
    assert function["inputs"][0] == {"name": "ids", "shape": ["batch"], "dtype": "int64"}
    assert [tensor["name"] for tensor in function["inputs"][1:]] == [tensor.name for tensor in loaded.info.state_layout]
    program = torch.export.load(out / function["file"]).module()
    made = program(torch.tensor([1, 2, 3]), *loaded.model.initial_state(3).values())
    assert [list(value.shape) for value in made] == [[3, *tensor["shape"][1:]] for tensor in function["outputs"]]


def test_invalid_value_names_its_option(nsm: Nsm, model_dir: Path, tmp_path: Path, tiny_tokenizer: Tokenizer) -> None:
    (tmp_path / "mine").write_text("")
    result = nsm("export", model_dir, "--output", tmp_path)
    assert_one_line(result, f"Invalid value for '--output': {tmp_path} is there and not an empty folder", status=2)
    result = nsm("export", model_dir, "--output", tmp_path / "out", "--format", "torch", "--int8")
    assert_one_line(result, "Invalid value for '--int8': needs --format onnx", status=2)
    register_baselines()
    complex_model = save_small_model(tmp_path / "complex", tiny_tokenizer, layer_pattern="d")
    result = nsm("export", complex_model, "--output", tmp_path / "out")
    said = "layer 0 (d) cannot be written as ONNX: S4D computes with complex numbers, which ONNX operators do not take"
    assert_one_line(result, f"Invalid value for '--format': {said}", status=2)
    result = nsm("export", tmp_path / "nothing", "--output", tmp_path / "out")
    assert_one_line(result, no_model(tmp_path / "nothing"))
