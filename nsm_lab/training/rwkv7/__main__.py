"""Command line of a training run of RWKV-7: `python -m nsm_lab.training.rwkv7`."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from nsm_core.errors import NsmError
from nsm_lab.training.rwkv7.config import Rwkv7TrainConfig
from nsm_lab.training.rwkv7.run import train

HELP = {
    "data": "directory with *-train*.jsonl.zst and *-val.jsonl.zst",
    "tokenizer": "tokenizer.json to use",
    "out": "directory for the model: weights in the official names, and the tokenizer",
    "cache": "directory for token ids; default OUT/cache",
}


def parse(argv: Sequence[str]) -> Rwkv7TrainConfig:
    """The run that `argv` asks for. Raises ConfigError."""
    parser = argparse.ArgumentParser("python -m nsm_lab.training.rwkv7", description="Train RWKV-7 on a corpus.")
    for field in dataclasses.fields(Rwkv7TrainConfig):
        is_required = field.default is dataclasses.MISSING
        flag, text = "--" + field.name.replace("_", "-"), HELP.get(field.name, f"default {field.default}")
        kind = Path if is_required or field.default is None else type(field.default)
        default = None if is_required else field.default
        parser.add_argument(flag, type=kind, required=is_required, default=default, help=text)
    return Rwkv7TrainConfig(**vars(parser.parse_args(argv)))


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0, or 1 after one line on stderr."""
    try:
        train(parse(sys.argv[1:] if argv is None else argv))
    except NsmError as error:
        print(f"nsm_lab.training.rwkv7: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
