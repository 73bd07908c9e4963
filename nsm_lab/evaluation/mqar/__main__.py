"""Command line of a recall run: `python -m nsm_lab.evaluation.mqar`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from nsm_core.config import ModelConfig
from nsm_core.errors import ConfigError, NsmError
from nsm_lab.evaluation.mqar.config import DEFAULT_MODEL, MqarConfig
from nsm_lab.evaluation.mqar.data import Task
from nsm_lab.evaluation.mqar.train import Recall

NUMBERS = {
    "batch": (int, "sequences a step"),
    "epochs": (int, "passes over the training set"),
    "lr": (float, "peak learning rate; Zoology tries 1e-3, 3.2e-3, 1e-2 and 3.2e-2"),
    "weight_decay": (float, "of the projections"),
    "warmup": (float, "share of the run"),
    "clip": (float, "most the norm of a gradient may be"),
    "target": (float, "stop when the mean over the test set reaches it"),
    "time_limit_s": (float, "seconds of training; the learning rate falls to zero by then"),
    "seed": (int, "of data and weights"),
    "device": (str, "auto, cpu, cuda, cuda:1"),
    "precision": (str, "auto, bf16 or fp32; auto is bf16 on a GPU"),
}


def build_parser() -> argparse.ArgumentParser:
    """One option for each field of MqarConfig; any field of the model by `--model NAME=VALUE`."""
    defaults = {field.name: field.default for field in dataclasses.fields(MqarConfig)}
    parser = argparse.ArgumentParser(
        "python -m nsm_lab.evaluation.mqar",
        description="Multi-query associative recall: trains a small model from scratch and tests it.",
    )
    for name, (kind, text) in NUMBERS.items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=kind, default=defaults[name], help=f"{text} (default %(default)s)")
    parser.add_argument("--mlp", action="store_true", help="with feed-forward layers; set their size by mlp_hidden")
    parser.add_argument("--compile", action="store_true", help="compile the loss: a minute for each sequence length")
    parser.add_argument(
        "--model", action="append", default=[], metavar="NAME=VALUE", help="of config.json, e.g. layer_pattern=WN"
    )
    for name in ("train", "test"):
        parser.add_argument(
            f"--{name}-task", action="append", type=_task, metavar="LENGTH,PAIRS,EXAMPLES", help="instead of Zoology's"
        )
    parser.add_argument("--output", type=Path, help="write OUTPUT.json and OUTPUT.md as well")
    return parser


def _task(text: str) -> Task:
    length, pairs, num_examples = (int(part) for part in text.split(","))
    return Task(length, pairs, num_examples)


def _model(changes: Sequence[str]) -> ModelConfig:
    fields = dataclasses.asdict(DEFAULT_MODEL)
    for change in changes:
        name, sign, value = change.partition("=")
        if not sign:
            raise ConfigError(f"--model takes NAME=VALUE, got {change!r}")
        fields[name] = value if isinstance(fields.get(name), str) else _number(name, value)
    return ModelConfig.from_dict(fields)


def _number(name: str, value: str) -> object:
    try:
        return json.loads(value)
    except ValueError as error:
        raise ConfigError(f"{name} must be a number, got {value!r}") from error


def parse(argv: Sequence[str]) -> MqarConfig:
    """The run that `argv` asks for. Raises ConfigError for values that cannot be used."""
    options = vars(build_parser().parse_args(argv))
    for name in ("train", "test"):
        if given := options.pop(f"{name}_task"):
            options[f"{name}_tasks"] = tuple(given)
    return MqarConfig(**{**options, "model": _model(options["model"])})


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report; exit status 0, or 1 after one line on stderr."""
    try:
        config = parse(sys.argv[1:] if argv is None else argv)
        report = Recall(config).run()
    except NsmError as error:
        print(f"mqar: {error}", file=sys.stderr)
        return 1
    if config.output is not None:
        report.save(config.output)
    print(report.to_markdown(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
