"""Runs the official package on a model and writes logits and states: `python official.py MODEL.pth IDS OUT`. With a
number behind these it goes on greedily for so many tokens, and writes their ids.

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
    model_path, ids_path, out_path = sys.argv[1:4]
    num_greedy = int(sys.argv[4]) if len(sys.argv) > 4 else 0
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
        states = {f"state.{index}": value.float().clone().contiguous() for index, value in enumerate(state)}
        greedy = [int(logits[-1][-1].argmax())]
        for _ in range(num_greedy - 1):
            one, state = model.forward([greedy[-1]], state)
            greedy.append(int(one.argmax()))
    save_file({"logits": torch.cat(logits), "greedy": torch.tensor(greedy)} | states, out_path)


if __name__ == "__main__":
    main()
