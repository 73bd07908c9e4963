"""Whole models with changed bytes: they open, or end with one line of the one kind of error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nsm_core.errors import CheckpointError
from nsm_core.rwkv7.claims import claims
from nsm_core.rwkv7.opening import open_files
from tests.support.rwkv7_files import WRITERS, hugging_face_tensors, model_tensors, write_hugging_face

TENSORS = model_tensors()
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = ("architectures", "model_type", "hidden_size", "num_hidden_layers", "head_dim", "norm_eps", "attn")
FEW = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def open_or_refuse(path: Path) -> None:
    message = str(path)
    try:
        if claims(path):
            tensors = open_files(path).tensors
            for name in ("emb.weight", "blocks.1.att.w1", "blocks.2.ffn.value.weight"):
                tensors[name]  # reads it
    except CheckpointError as error:
        message = str(error)
    assert str(path) in message
    assert "\n" not in message


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {name: tmp_path_factory.mktemp("model") for name in ("pth", "st", "gguf")}
    found = {name: WRITERS[name](folder, TENSORS) for name, folder in folders.items()}
    parts = write_hugging_face(tmp_path_factory.mktemp("parts") / "hf", hugging_face_tensors(TENSORS), num_parts=2)
    return found | {"hf": parts}


@pytest.mark.parametrize("layout", ["pth", "st", "gguf", "hf"])
@FEW
@given(data=st.data())
def test_a_model_with_changed_bytes_opens_or_is_refused(
    models: dict[str, Path], layout: str, data: st.DataObject
) -> None:
    """Of `hf` one of its parts, beside a sound index."""
    model = models[layout]
    path = data.draw(st.sampled_from(sorted(model.glob("*.safetensors")))) if model.is_dir() else model
    sound = path.read_bytes()
    # Most of what can go wrong is at the beginning, or at the end of a zip archive
    near = st.integers(0, 20_000) | st.integers(1, 20_000).map(lambda back: len(sound) - back)
    changed = bytearray(sound)
    for at in data.draw(st.lists(near | st.integers(0, len(sound) - 1), min_size=1, max_size=6)):
        changed[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.none() | st.integers(0, len(sound)))
    try:
        path.write_bytes(changed[:cut])
        open_or_refuse(model)
    finally:
        path.write_bytes(sound)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "tokenizer_config.json"])
@FEW
@given(raw=st.binary(max_size=200) | JSON.map(lambda value: repr(value).encode()))
def test_any_bytes_as_a_json_file_open_or_are_refused(models: dict[str, Path], name: str, raw: bytes) -> None:
    _with_file(models["hf"], name, raw)


@FEW
@given(changes=st.dictionaries(st.sampled_from(FIELDS), JSON, min_size=1, max_size=3))
def test_any_values_in_a_config_open_or_are_refused(models: dict[str, Path], changes: dict[str, object]) -> None:
    fields = json.loads((models["hf"] / "config.json").read_text()) | changes
    _with_file(models["hf"], "config.json", json.dumps(fields).encode())


@FEW
@given(value=JSON, tensor=st.sampled_from(["model.embeddings.weight", "another", ""]))
def test_any_values_in_an_index_open_or_are_refused(models: dict[str, Path], value: object, tensor: str) -> None:
    file = models["hf"] / "model.safetensors.index.json"
    fields = json.loads(file.read_text())
    fields["weight_map"][tensor] = value
    _with_file(models["hf"], file.name, json.dumps(fields).encode())


def _with_file(directory: Path, name: str, raw: bytes) -> None:
    file = directory / name
    sound = file.read_bytes() if file.exists() else None
    try:
        file.write_bytes(raw)
        open_or_refuse(directory)
    finally:
        if sound is None:
            file.unlink()
        else:
            file.write_bytes(sound)
