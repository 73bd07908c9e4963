"""What an exported model is against the model: `python -m benchmarks.export [--model NAME] [--tokens 64]`.

Greedy text token by token in ONNX Runtime and in PyTorch, the same ids fed to both: size, logits, speed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from onnxruntime.quantization import QuantType, quantize_dynamic

from nsm_core.model.loader import LoadedNsm, load_checkpoint
from nsm_lab.baselines.register import register_baselines
from nsm_lab.evaluation.markdown import table
from nsm_lab.export.functions import IDS, LOGITS, NEW
from nsm_lab.export.write import export_model

Step = Callable[[Any, dict[str, Any]], tuple[Any, dict[str, Any]]]
BATCHES = (1, 8, 32)
REPEATS = 20


def onnx_step(path: Path, *, in_fp32: bool = False) -> Step:
    """`keeps_inputs`: ONNX Runtime multiplies int8 matrices with inputs in fp32; it would round those to int8 too."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    if in_fp32:
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def run(ids: Any, state: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        made = dict(zip(names, session.run(None, {IDS: ids, **state}), strict=True))
        return made[LOGITS], {name: made[NEW + name] for name in state}

    return run


def torch_step(loaded: LoadedNsm) -> Step:
    @torch.inference_mode()
    def run(ids: Any, state: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        given = {name: torch.from_numpy(value) for name, value in state.items()}
        hidden, new = loaded.model.step(torch.from_numpy(ids), given)
        return loaded.model.logits(hidden).numpy(), {name: value.numpy() for name, value in new.items()}

    return run


def start(loaded: LoadedNsm, rows: int) -> dict[str, Any]:
    return {name: value.numpy() for name, value in loaded.model.initial_state(rows).items()}


def differences(loaded: LoadedNsm, step: Step, num_tokens: int) -> tuple[float, float, int]:
    """Largest and mean difference of logits, and at how many tokens the likeliest is the same."""
    own = torch_step(loaded)
    prompt = loaded.tokenizer.encode("It was a bright morning, and the")
    state, other = start(loaded, 1), start(loaded, 1)
    token, largest, total, same = loaded.tokenizer.end_of_text_id, 0.0, 0.0, 0
    for index in range(len(prompt) + num_tokens):
        ids = np.array([token])
        logits, state = own(ids, state)
        found, other = step(ids, other)
        if index >= len(prompt):
            error = np.abs(logits - found)
            largest, total = max(largest, float(error.max())), total + float(error.mean())
            same += int(logits.argmax() == found.argmax())
        token = prompt[index] if index < len(prompt) else int(logits.argmax())
    return largest, total / num_tokens, same


def milliseconds(loaded: LoadedNsm, step: Step, rows: int) -> float:
    """Of CPU time a step, the median: other processes do not count."""
    state, ids, taken = start(loaded, rows), np.full(rows, 5), []
    for _ in range(REPEATS):
        began = time.process_time()
        _, state = step(ids, state)
        taken.append(time.process_time() - began)
    return float(np.median(taken)) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("pulse-books-small"))
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    torch.set_num_threads(1)
    register_baselines()
    loaded = load_checkpoint(args.model)
    rows, results = [], []
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder) / name / "step.onnx" for name in ("fp32", "int8")}
        for name, path in paths.items():
            export_model(loaded, path.parent, "onnx", is_int8=name == "int8")
        paths["dynamic int8"] = Path(folder) / "dynamic.onnx"
        quantize_dynamic(paths["fp32"], paths["dynamic int8"], weight_type=QuantType.QInt8, per_channel=True)
        steps: dict[str, tuple[Step, int | None]] = {"PyTorch": (torch_step(loaded), None)}
        steps |= {name: (onnx_step(path), path.stat().st_size) for name, path in paths.items()}
        exact = onnx_step(paths["int8"], in_fp32=True)
        steps["int8, inputs in fp32"] = exact, paths["int8"].stat().st_size
        for name, (step, size) in steps.items():
            largest, mean, same = differences(loaded, step, args.tokens)
            speed = {batch: milliseconds(loaded, step, batch) for batch in BATCHES}
            rows.append(
                [name, "" if size is None else f"{size / 1e6:.1f}", f"{largest:.2g}", f"{mean:.2g}",
                 f"{same} of {args.tokens}", *(f"{speed[batch]:.2f}" for batch in BATCHES)]
            )  # fmt: skip
            results.append({"name": name, "bytes": size, "largest": largest, "mean": mean, "same": same, "ms": speed})
    heads = ["", "MB", "largest difference", "mean", "same token", *(f"ms at {batch} rows" for batch in BATCHES)]
    print(table(heads, rows))
    print(json.dumps({"model": loaded.name, "tokens": args.tokens, "results": results}))


if __name__ == "__main__":
    main()
