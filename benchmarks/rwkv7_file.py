"""A file of RWKV-7 with random weights, as people have them: `python -m benchmarks.rwkv7_file --size 0.1B --out DIR`.

bf16 in official names, with a vocabulary beside it: the World vocabulary if a package has it, or else one of as many
made-up tokens. Tensors are made and written one by one.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import torch

from benchmarks.rwkv7_models import SIZES, RandomTensors, config_of
from nsm_core.errors import CheckpointError
from nsm_core.formats.safetensors_file import write_safetensors
from nsm_core.rwkv7.config import Rwkv7Config
from nsm_core.world_tokenizer import VOCABULARY_FILE, WorldTokenizer, find_vocabulary

NUM_TOKENS = 65_529
LETTERS = b"etaoinshrdlu "


def made_up_tokens(number: int) -> dict[int, bytes]:
    """All single bytes, then words of LETTERS, the shortest first."""
    words = (bytes(word) for size in itertools.count(2) for word in itertools.product(LETTERS, repeat=size))
    tokens = itertools.chain((bytes((byte,)) for byte in range(256)), words)
    return dict(enumerate(itertools.islice(tokens, number), start=1))


def write_vocabulary(directory: Path, most_tokens: int) -> None:
    try:
        raw = find_vocabulary(directory).read_bytes() if most_tokens >= NUM_TOKENS else b""
    except CheckpointError:
        raw = b""
    if raw:
        (directory / VOCABULARY_FILE).write_bytes(raw)
    else:
        WorldTokenizer(made_up_tokens(min(most_tokens, NUM_TOKENS))).save(directory / VOCABULARY_FILE)


def write_file(config: Rwkv7Config, directory: Path, name: str) -> Path:
    """The file's path."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = RandomTensors(config)
    planned = ((each, torch.bfloat16, tensors.shape(each)) for each in tensors)
    path = directory / f"{name}.safetensors"
    write_safetensors(path, planned, tensors.__getitem__, metadata={})
    write_vocabulary(directory, config.vocab_size - 1)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="0.1B")
    parser.add_argument("--out", type=Path, required=True, help="directory")
    arguments = parser.parse_args()
    print(write_file(config_of(arguments.size), arguments.out, f"rwkv7-random-{arguments.size}"))


if __name__ == "__main__":
    main()
