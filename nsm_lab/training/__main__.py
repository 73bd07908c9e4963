"""Command line of a training run: `python -m nsm_lab.training`, also under torchrun; `nsm train` calls the same."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from nsm_core.config import ModelConfig
from nsm_core.errors import NsmError
from nsm_lab.training.config import TrainConfig
from nsm_lab.training.loop import train
from nsm_lab.training.presets import PRESETS


def _sizes(text: str) -> tuple[int, ...]:
    """`16,32` as numbers; nothing: none."""
    try:
        return tuple(int(part) for part in text.split(",")) if text.strip() else ()
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be whole numbers with commas between, as 16,32, got {text!r}") from None


def _shares(text: str) -> tuple[float, ...]:
    """`0.05,0.01` as numbers; nothing: none."""
    try:
        return tuple(float(part) for part in text.split(",")) if text.strip() else ()
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be numbers with commas between, as 0.05,0.01, got {text!r}") from None


def _is_true(text: str) -> bool:
    return {"true": True, "false": False}[text]


MODEL_FIELDS: dict[str, Callable[[str], object]] = {
    "layer_pattern": str,
    "vocab_size": int,
    "d_model": int,
    "num_layers": int,
    "num_heads": int,
    "num_memory_slots": int,
    "router": str,
    "write_top_k": int,
    "mlp_hidden": int,
    "timescale_groups": int,
    "num_kv_heads": int,
    "window": int,
    "max_context": int,
    "gate": str,
    "gate_chunk": int,
    "projector": str,
    "communication_top_k": int,
    "upper_slots": int,
    "memory_rows": int,
    "memory_width": int,
    "memory_heads": int,
    "slot_width": int,
    "communication_interval": int,
    "allocation": _is_true,
    "start_slots": int,
    "state_tiers": _sizes,
}
HELP = {
    "data": "directory with *-train*.jsonl.zst and *-val.jsonl.zst",
    "out": "directory for the model, the log and what a resumed run needs",
    "tokenizer": "tokenizer.json to use; without it one is learned from the training split",
    "cache": "directory for token ids, which runs may share; default OUT/cache",
    "start": "model directory whose weights the run begins with; default: new ones",
    "keep_strengths": "as 0.05,0.018,0.0066: so many heads of each keyed layer are made to keep what they hold, and "
    "write no more than this of a token, but for what the token adds; default none",
    "keep_context": "with heads that keep: how much a strength may depend on the token; 0: not at all, 1 (default): so "
    "much that a head may write ten thousand times as strongly as its bound",
    "keep_budget": "with heads that keep: after so many steps again and again, a head that writes more of a token than "
    "--keep-strengths says, on average, is made to write less; 0 (default): never",
    "silent_tokens": "tokens of a passage that returns which nothing foretells: without weight in the loss (default 8)",
    "recall_loss": "answers (default): of inserted facts what a question asks for counts alone; all: every word does",
    "first_answer": "weight in the loss of the first token of an answer (default 3, that of its others)",
    "recall_end": "the share of --recall at the end of the run, reached in a straight line; default: the same",
    "resume": "go on from the last save in --out",
}


def build_parser() -> argparse.ArgumentParser:
    """One option for each field of TrainConfig and for each size of the model."""
    parser = argparse.ArgumentParser("nsm train", description="Train a model on a corpus directory.")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="base", help="model size to start from")
    for name, kind in MODEL_FIELDS.items():
        parser.add_argument(_flag(name), type=kind, help="overrides the preset")
    for field in dataclasses.fields(TrainConfig):
        if field.name == "model":
            continue
        required = field.default is dataclasses.MISSING
        default = None if required else field.default
        text = HELP.get(field.name, f"default {default}")
        if isinstance(default, bool):
            action = argparse.BooleanOptionalAction
            parser.add_argument(_flag(field.name), action=action, default=default, help=text)
        else:
            value = _type_of(field.name, required, default)
            parser.add_argument(_flag(field.name), type=value, required=required, default=default, help=text)
    return parser


def _type_of(name: str, is_path: bool, default: object) -> Callable[[str], object]:
    if is_path or name in ("tokenizer", "cache", "start"):
        return Path
    if name == "keep_strengths":
        return _shares
    return float if name == "recall_end" else type(default)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def parse(argv: Sequence[str]) -> TrainConfig:
    """The run that `argv` asks for. Raises ConfigError for values that cannot be used."""
    options = vars(build_parser().parse_args(argv))
    model = dataclasses.asdict(PRESETS[options.pop("preset")])
    given = {name: value for name in MODEL_FIELDS if (value := options.pop(name)) is not None}
    model.update(given)
    if model["router"] == "sigmoid" and "write_top_k" not in given:
        model["write_top_k"] = model["num_memory_slots"]  # it writes to all, however many there are
    return TrainConfig(model=ModelConfig.from_dict(model), **options)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0, or 1 after one line on stderr."""
    try:
        out = train(parse(sys.argv[1:] if argv is None else argv))
    except NsmError as error:
        print(f"nsm train: {error}", file=sys.stderr)
        return 1
    if os.environ.get("RANK", "0") == "0":
        print(f"model written to {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
