"""Writes a folder with a model's functions as graphs and everything needed to run them without this package."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from nsm_core.errors import ConfigError
from nsm_core.model.loader import LoadedNsm
from nsm_core.model.storage import CONFIG_FILE
from nsm_core.tokenizer import TOKENIZER_FILE
from nsm_lab.export.functions import (
    IDS,
    LOGITS,
    MAX_BATCH,
    NEW,
    STEP,
    Function,
    reading,
    refuse_kinds,
    trace,
)

Format = Literal["onnx", "torch"]
MANIFEST_FILE, START_FILE = "manifest.json", "initial_state.npz"
SUFFIXES: dict[Format, str] = {"onnx": ".onnx", "torch": ".pt2"}
VERSION = 1  # of the manifest


def export_model(
    loaded: LoadedNsm,
    directory: Path,
    form: Format,
    *,
    is_int8: bool = False,
    prompt_len: int | None = None,
) -> list[Path]:
    """Writes the step, with `prompt_len` also a function that reads this number of tokens at once; returns all files.

    Raises ConfigError where the folder is not empty, or a layer has no such form.
    """
    check_target(directory)
    if form == "onnx":
        _require_onnx(loaded)
    functions = [STEP, *([] if prompt_len is None else [reading(prompt_len)])]
    directory.mkdir(parents=True, exist_ok=True)
    for function in functions:
        _write_function(loaded, function, directory, form, is_int8)
    initial = loaded.model.initial_state(1)
    np.savez(directory / START_FILE, allow_pickle=False, **{name: value.numpy() for name, value in initial.items()})
    loaded.tokenizer.save(directory / TOKENIZER_FILE)
    (directory / CONFIG_FILE).write_text(loaded.config.to_json(), "utf-8")
    described = manifest(loaded, functions, form, is_int8=is_int8)
    (directory / MANIFEST_FILE).write_text(json.dumps(described, indent=2) + "\n", "utf-8")
    return sorted(directory.iterdir())


def check_target(directory: Path) -> None:
    """Raises ConfigError unless the folder can be made or is empty."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} is there and not an empty folder")


def manifest(loaded: LoadedNsm, functions: list[Function], form: Format, *, is_int8: bool) -> dict[str, Any]:
    """What the files are: plain JSON values."""
    return {
        "version": VERSION,
        "format": form,
        "model": loaded.name,
        "fingerprint": loaded.fingerprint,
        "weights": "int8" if is_int8 else "fp32",
        "opset": _opset() if form == "onnx" else None,
        "vocab_size": loaded.tokenizer.vocab_size,
        "start_id": loaded.tokenizer.end_of_text_id,
        "max_batch": MAX_BATCH,
        "initial_state": START_FILE,
        "tokenizer": TOKENIZER_FILE,
        "functions": [_described(loaded, function, form) for function in functions],
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


def _described(loaded: LoadedNsm, function: Function, form: Format) -> dict[str, Any]:
    layout = loaded.model.state_spec.layout()
    state = [{"name": tensor.name, "shape": ["batch", *tensor.shape], "dtype": tensor.dtype} for tensor in layout]
    ids = {"name": IDS, "shape": ["batch", *function.ids_shape], "dtype": "int64"}
    logits = {"name": LOGITS, "shape": ["batch", loaded.config.vocab_size], "dtype": "float32"}
    return {
        "name": function.name,
        "file": function.name + SUFFIXES[form],
        "inputs": [ids, *state],
        "outputs": [logits, *({**tensor, "name": f"{NEW}{tensor['name']}"} for tensor in state)],
    }


def _write_function(loaded: LoadedNsm, function: Function, directory: Path, form: Format, is_int8: bool) -> None:
    path = directory / (function.name + SUFFIXES[form])
    program = trace(loaded.model, function)
    if form == "torch":
        torch.export.save(program, path)
        return
    from nsm_lab.export.onnx_file import write_onnx

    write_onnx(program, loaded.model, path, is_int8=is_int8)


def _require_onnx(loaded: LoadedNsm) -> None:
    from nsm_lab.export.onnx_file import REFUSED

    refuse_kinds(loaded.config.layer_pattern, loaded.config.num_layers, REFUSED, "ONNX")


def _opset() -> int:
    from nsm_lab.export.onnx_file import OPSET

    return OPSET
