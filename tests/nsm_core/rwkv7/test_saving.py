"""A model in this project's own form is the model it was made from, as exactly as the format says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nsm_core.errors import CheckpointError
from nsm_core.formats.int4_groups import quantize_int4
from nsm_core.rwkv7.claims import claims
from nsm_core.rwkv7.opening import OpenModel, open_files
from nsm_core.rwkv7.saving import FORMATS, LARGE, save_model
from nsm_core.rwkv7.tensors import tensor_shapes
from nsm_core.rwkv7.weights import CheckedTensors
from nsm_core.world_tokenizer import VOCABULARY_FILE
from tests.support.rwkv7_files import CONFIG, WRITERS, model_tensors

TENSORS = model_tensors()


def saved(tmp_path: Path, weight_format: str, tensors: dict[str, torch.Tensor] = TENSORS) -> Path:
    out = tmp_path / weight_format
    save_model(OpenModel(WRITERS["pth"](tmp_path, tensors)), out, weight_format, chat_template="rwkv-think-v1")
    return out


@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_model_is_written_and_opened_again(tmp_path: Path, weight_format: str) -> None:
    out = saved(tmp_path, weight_format)
    assert sorted(file.name for file in out.iterdir()) == ["config.json", VOCABULARY_FILE, "weights.safetensors"]
    assert claims(out)
    files = open_files(out)
    assert (files.config, files.weight_format) == (CONFIG, weight_format)
    assert (files.chat_template, files.name) == ("rwkv-think-v1", weight_format)
    tolerance = {"fp32": 0.0, "fp16": 1e-3, "bf16": 8e-3, "int8": 8e-3, "int4": 0.15}[weight_format]
    for name, shape in tensor_shapes(CONFIG).items():
        value, want = files.tensors[name].float(), TENSORS[name]
        assert value.shape == shape
        row_limit = tolerance * want.abs().amax(dim=-1, keepdim=True).clamp(min=1e-3)
        assert bool(((value - want).abs() <= row_limit).all()), name
        if len([size for size in shape if size > 1]) < 2 or name.endswith("r_k"):
            assert torch.equal(value, want), name  # vectors are never rounded


def test_fp32_is_the_same_model_by_fingerprint(tmp_path: Path) -> None:
    first = open_files(WRITERS["pth"](tmp_path, TENSORS))
    assert open_files(saved(tmp_path, "fp32")).fingerprint == first.fingerprint
    assert open_files(saved(tmp_path, "int8")).fingerprint != first.fingerprint


def test_int8_rounds_the_large_matrices_alone_and_once(tmp_path: Path) -> None:
    halves = {name: value.bfloat16() for name, value in TENSORS.items()}
    once = OpenModel(saved(tmp_path, "int8", halves))
    for name, source in once.tensors.sources.items():
        kind = source.stored.kind.name
        if name.endswith(LARGE):
            assert kind == "I8", name
        else:
            assert kind == ("BF16" if len(source.shape) == 2 and not name.endswith("r_k") else "F32"), name
    save_model(once, tmp_path / "again", "int8", chat_template="rwkv-v1")
    again = OpenModel(tmp_path / "again").tensors
    for name in tensor_shapes(CONFIG):
        torch.testing.assert_close(again[name], once.tensors[name], rtol=1e-6, atol=0)


def test_int4_keeps_its_grids_when_it_is_written_again(tmp_path: Path) -> None:
    once = OpenModel(saved(tmp_path, "int4"))
    save_model(once, tmp_path / "again", "int4", chat_template="rwkv-think-v1")
    again = OpenModel(tmp_path / "again")
    assert (
        again.tensors.fingerprint()
        == once.tensors.fingerprint()
        != OpenModel(saved(tmp_path, "int8")).tensors.fingerprint()
    )
    weight = "blocks.1.ffn.key.weight"
    packed = quantize_int4(TENSORS[weight]).packed()
    assert once.tensors[weight].equal(packed.dense())
    found = again.tensors.packed(weight)
    assert found is not None
    assert found.numbers.equal(packed.numbers)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop("head.weight.int4_steps"), "holds numbers of 4 bits without scale and grids"),
        (lambda tensors: tensors["head.weight.int4_steps"].zero_(), "has a grid beyond int8"),
        (lambda tensors: tensors["head.weight.row_scale"].fill_(torch.nan), "holds a number that is not finite"),
    ],
)
def test_damaged_grids_are_refused_by_name(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], object], words: str
) -> None:
    out = saved(tmp_path, "int4")
    tensors = load_file(out / "weights.safetensors")
    change(tensors)
    save_file(tensors, out / "weights.safetensors")
    with pytest.raises(CheckpointError, match=f"the tensor head.weight {words}"):
        CheckedTensors(CONFIG, open_files(out).tensors).packed("head.weight")


def test_numbers_that_a_format_cannot_hold_are_refused_by_name(tmp_path: Path) -> None:
    large = TENSORS | {"head.weight": TENSORS["head.weight"] * 1e6}
    with pytest.raises(CheckpointError, match=r"model.pth: the tensor head.weight holds numbers that torch.float16"):
        saved(tmp_path, "fp16", large)
    assert list((tmp_path / "fp16").iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architecture": "mamba2"}, "the architecture is 'mamba2'"),
        ({"num_layers": 2}, "there are 3 layers, and its configuration says 2"),
        ({"norm_eps": "small"}, "norm_eps must be a number from 0 to 1, got small"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, object], says: str) -> None:
    out = saved(tmp_path, "fp32")
    fields = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(fields | changes))
    with pytest.raises(CheckpointError) as refused:
        open_files(out)
    assert says in str(refused.value)


def test_int8_rows_without_their_scales_are_refused(tmp_path: Path) -> None:
    out = saved(tmp_path, "int8")
    tensors = load_file(out / "weights.safetensors")
    scale = tensors.pop("head.weight.row_scale")
    save_file(tensors, out / "weights.safetensors")
    with pytest.raises(CheckpointError, match=r"the tensor head.weight holds int8 numbers without a scale"):
        open_files(out)
    save_file(tensors | {"head.weight.row_scale": scale[:5].clone()}, out / "weights.safetensors")
    with pytest.raises(CheckpointError, match=r"the tensor head.weight.row_scale has the shape \[5\], not \[640\]"):
        open_files(out)
