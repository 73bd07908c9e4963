"""Runs the official package on a model file and writes logits and states: `python official.py model.pth ids.pt out.pt`.

A process of its own: the package reads the environment when it is imported, and prints.
"""

from __future__ import annotations

import os
import sys

import torch
from safetensors.torch import load_file, save_file


def main() -> None:
    model_path, ids_path, out_path = sys.argv[1:]
    os.environ |= {"RWKV_V7_ON": "1", "RWKV_JIT_ON": "0", "RWKV_CUDA_ON": "0"}
    from rwkv.model import RWKV  # type: ignore[import-untyped]

    model = RWKV(model=model_path.removesuffix(".pth"), strategy="cpu fp32")
    ids = load_file(ids_path)["ids"].tolist()
    logits, state = [], None
    with torch.inference_mode():
        for token_id in ids:
            one, state = model.forward([token_id], state)
            logits.append(one.float())
    assert state is not None
    states = {f"state.{index}": value.float().contiguous().clone() for index, value in enumerate(state)}
    save_file({"logits": torch.stack(logits)} | states, out_path)


if __name__ == "__main__":
    main()
