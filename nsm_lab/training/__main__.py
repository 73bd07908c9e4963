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


@dataclasses.dataclass(frozen=True, slots=True)
class _ModelOption:
    """`kind` reads the option's text."""

    kind: Callable[[str], object]
    text: str


MODEL_OPTIONS = {
    "layer_pattern": _ModelOption(str, "a letter for each layer, repeated as often as needed: see docs/model.md"),
    "vocab_size": _ModelOption(int, "tokens in the vocabulary"),
    "d_model": _ModelOption(int, "width of the layers"),
    "num_layers": _ModelOption(int, "number of layers"),
    "num_heads": _ModelOption(int, "heads of a layer"),
    "num_memory_slots": _ModelOption(int, "memory slots of a head"),
    "router": _ModelOption(str, "softmax: slots compete for a token; sigmoid: each slot decides for itself"),
    "write_top_k": _ModelOption(int, "slots of a head that a token writes to"),
    "mlp_hidden": _ModelOption(int, "width of the feed-forward part"),
    "timescale_groups": _ModelOption(int, "groups of slots whose decays begin at different rates"),
    "num_kv_heads": _ModelOption(int, "key and value heads of W and A layers"),
    "window": _ModelOption(int, "tokens that a W layer attends to"),
    "max_context": _ModelOption(int, "tokens that an A layer attends to"),
    "gate": _ModelOption(str, "how G layers change their slots: gru, lstm or free"),
    "gate_chunk": _ModelOption(int, "tokens between two changes of the slots of G layers and the memories of M layers"),
    "projector": _ModelOption(str, "how N and C layers read their slots: attention, direct or hybrid"),
    "communication_top_k": _ModelOption(int, "other slots that a slot of a C layer exchanges with; 0: all"),
    "upper_slots": _ModelOption(int, "slots of a C layer's second level, in each head"),
    "memory_rows": _ModelOption(int, "rows of an M layer's memory"),
    "memory_width": _ModelOption(int, "numbers in a row of it"),
    "memory_heads": _ModelOption(int, "heads that read and write it"),
    "slot_width": _ModelOption(int, "numbers in a slot of a K layer; 0: the width of a head"),
    "communication_interval": _ModelOption(int, "tokens between two exchanges of a C layer"),
    "allocation": _ModelOption(_is_true, "true: N and C layers take slots into use and give them up"),
    "start_slots": _ModelOption(int, "with --allocation: slots in use at the start of a text; 0: all"),
    "state_tiers": _ModelOption(_sizes, "as 16,32: smaller numbers of slots that a text may be read with"),
}
TRAINING_HELP = {
    "data": "directory with *-train*.jsonl.zst and *-val.jsonl.zst",
    "out": "directory for the model, the log and what a resumed run needs",
    "tokenizer": "tokenizer.json to use; without it one is learned from the training split",
    "cache": "directory for token ids, which runs may share; without it OUT/cache",
    "steps": "steps of the optimiser",
    "seq_len": "tokens in a row",
    "rows": "rows that a process reads in a step",
    "accumulate": "parts that a step's rows are split into, to save memory",
    "muon_lr": "learning rate of the matrices inside the layers",
    "adam_lr": "learning rate of everything else",
    "weight_decay": "weight decay of the matrices",
    "warmup": "share of the steps in which the learning rates rise",
    "schedule": "linear: constant, then to zero over --decay; cosine: from the top to zero",
    "decay": "share of the steps in which the linear schedule falls",
    "clip": "largest norm of the gradient",
    "balance_loss": "weight of a penalty on uneven use of slots; 0: none",
    "z_loss": "weight of a penalty on large router logits; 0: none",
    "key_spread": "K layers: weight of a penalty on written keys that resemble each other; 0: none",
    "dropout": "share of the activations that are left out",
    "carry": "share of the steps whose rows start from the state at the end of the step before",
    "recall": "share of the training tokens that repeat passages, or state and ask for invented facts",
    "recall_end": "share of --recall at the end of the run, reached in a straight line; without it the same",
    "recall_loss": "answers: of inserted facts only answers have loss; all: every inserted word has",
    "first_answer": "weight in the loss of the first token of an answer; its other tokens weigh 3",
    "silent_tokens": "first tokens of a returning passage that have no loss",
    "passage_weight": "weight of its later tokens in the loss",
    "passages": "of what is inserted, the share of passages, by number; the others are facts with their questions",
    "far_passages": "of the passages, the share that returns 6,000 to 32,000 tokens later; the others: 640 to 40,960",
    "whole_rows": "layers A with --carry 0: every row is text of one document, the last one of each is padded",
    "tier_share": "share of the rows that are read with one of --state-tiers, or with all slots",
    "start": "model directory of the same sizes whose weights the run begins with; without it new weights",
    "loops": "with --recall: share of the training tokens that repeat the text just before them, without loss",
    "loop_penalty": "with --loops: weight of a penalty on tokens that are likelier than before the text repeated",
    "keep_strengths": "K layers: as 0.05,0.018,0.0066: makes one long-term head in each layer for each number. Such a "
    "head has no decay, and a token overwrites at most this share of a slot: with M slots it holds about M / share "
    "tokens",
    "keep_context": "with --keep-strengths: how far a token may raise the share above its number. 0: not at all; 1: up "
    "to ten thousand times",
    "keep_budget": "with --keep-strengths: steps after which, again and again, the share of long-term heads that wrote "
    "more than their number on average is lowered; 0: never",
    "ema": "decay of averaged weights, which are then validated and saved; 0: none",
    "seed": "of new weights and of the order of the rows",
    "device": "auto, cpu, cuda or cuda:N",
    "precision": "auto: bf16 on a GPU, fp32 on a CPU; or bf16 or fp32",
    "compile": "compile the layers on a GPU",
    "checkpoint_blocks": "compute activations twice: less memory, about a third slower",
    "eval_every": "steps between two validations",
    "eval_batches": "batches of a validation",
    "save_every": "steps between two saves",
    "weight_format": "of the saved weights: fp32, bf16, int8 or int4",
    "resume": "go on from the last save in --out",
}


def build_parser() -> argparse.ArgumentParser:
    """One option for each field of TrainConfig and for each size of the model."""
    parser = argparse.ArgumentParser("nsm train", description="Train a model on a corpus directory.")
    shape = parser.add_argument_group("model", "An option replaces one value of the preset.")
    shape.add_argument("--preset", choices=sorted(PRESETS), default="base", help="layers and sizes (default base)")
    for name, option in MODEL_OPTIONS.items():
        shape.add_argument(_flag(name), type=option.kind, help=option.text)
    training = parser.add_argument_group("training")
    for field in dataclasses.fields(TrainConfig):
        if field.name == "model":
            continue
        required = field.default is dataclasses.MISSING
        default = None if required else field.default
        text = TRAINING_HELP[field.name] + ("" if default is None or default == () else f" (default {default})")
        if isinstance(default, bool):
            action = argparse.BooleanOptionalAction
            training.add_argument(_flag(field.name), action=action, default=default, help=text)
        else:
            value = _type_of(field.name, required, default)
            training.add_argument(_flag(field.name), type=value, required=required, default=default, help=text)
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
    given = {name: value for name in MODEL_OPTIONS if (value := options.pop(name)) is not None}
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
