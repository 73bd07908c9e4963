"""Runs the official package on a model file and writes logits and states: `python official.py MODEL.pth IDS OUT`.

A process of its own: the package reads the environment when it is imported, and prints. It reads the text in pieces,
and the last tokens one by one, so that both of its ways are compared.
"""

from __future__ import annotations

import os
import sys

import torch
from safetensors.torch import load_file, save_file

PIECE_LEN, SINGLE_TOKENS = 128, 20


def main() -> None:
    model_path, ids_path, out_path = sys.argv[1:]
    os.environ |= {"RWKV_V7_ON": "1", "RWKV_JIT_ON": "0", "RWKV_CUDA_ON": "0"}
    from rwkv.model import RWKV  # type: ignore[import-untyped]

    model = RWKV(model=model_path.removesuffix(".pth"), strategy="cpu fp32")
    ids = load_file(ids_path)["ids"].tolist()
    logits, state = [], None
    with torch.inference_mode():
        for piece in (ids[start : start + PIECE_LEN] for start in range(0, len(ids) - SINGLE_TOKENS, PIECE_LEN)):
            read = piece[: len(ids) - SINGLE_TOKENS - PIECE_LEN * len(logits)]
            several, state = model.forward(read, state, full_output=True)
            logits.append(several.float().reshape(len(read), -1))
        for token_id in ids[-SINGLE_TOKENS:]:
            one, state = model.forward([token_id], state)
            logits.append(one.float()[None])
    assert state is not None
    states = {f"state.{index}": value.float().contiguous().clone() for index, value in enumerate(state)}
    save_file({"logits": torch.cat(logits)} | states, out_path)


if __name__ == "__main__":
    main()
