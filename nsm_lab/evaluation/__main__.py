"""Command line of an evaluation: `python -m nsm_lab.evaluation`; `nsm eval` calls the same."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from nsm_core.errors import NsmError
from nsm_lab.evaluation.config import PARTS, EvalConfig
from nsm_lab.training.data_files import SPLITS

HELP = {
    "data": "directory with *-val.jsonl.zst or *-test.jsonl.zst",
    "model": "model directory (default: the bundled model)",
    "max_documents": "read only the first documents (default: all)",
    "max_tokens_per_document": "read each document up to this token (default: to the end)",
    "segment_len": "tokens a forward call; speed and memory only (default %(default)s)",
    "batch_documents": "documents side by side; speed and memory only (default %(default)s)",
    "device": "auto, cpu, cuda, cuda:1 (default %(default)s)",
    "precision": "auto, bf16 or fp32; auto is bf16 on a GPU; of the executor eager (default %(default)s)",
    "executor": "whose numbers are measured, as NSM_EXECUTOR (default %(default)s)",
    "sample_tokens": "most tokens of a sample (default %(default)s)",
    "passkey_examples": "prompts for each length and depth (default %(default)s)",
    "stored_state_prefix": "tokens read before each time a state is stored (default %(default)s)",
    "stored_state_count": "most times that a document's state is stored (default %(default)s)",
    "split_tokens": "tokens read whole and in pieces (default %(default)s)",
    "history_passages": "repeated passages of a document (default %(default)s)",
    "history_prompts": "prompts with a key of a document, for each context (default %(default)s)",
    "seed": "of the drawn samples and the keys (default %(default)s)",
    "output": "write OUTPUT.json and OUTPUT.md as well, and the curves of history as OUTPUT.svg",
}
PATHS = ("data", "model", "output")
HISTORY_HELP = {
    "history_starts": "fresh starts before a span, in tokens",
    "history_spans": "first tokens of the spans",
    "history_repeats": "how many tokens back a passage was read before",
    "history_contexts": "tokens of a prompt with a key",
    "history_distances": "tokens from a key to the end of its prompt",
}
TEXTS = ("device", "precision", "executor")
SEVERAL = ("buckets", "prompts", "suite", "passkey_lengths", "passkey_depths", *HISTORY_HELP)
SHORT = {"max_tokens_per_document": "--max-tokens", "output": "--out"}  # the names of other commands


def build_parser() -> argparse.ArgumentParser:
    """One option for each field of EvalConfig; `--prompt` may be repeated, `--buckets` takes several values."""
    defaults = {field.name: field.default for field in dataclasses.fields(EvalConfig)}
    parser = argparse.ArgumentParser(
        "nsm eval", description="Quality of a model on the documents of a corpus: loss by position, recall, state."
    )
    for name, text in HELP.items():
        kind = Path if name in PATHS else str if name in TEXTS else int
        is_required = defaults[name] is dataclasses.MISSING
        default = None if is_required else defaults[name]
        flags = ["--" + name.replace("_", "-"), *([SHORT[name]] if name in SHORT else [])]
        parser.add_argument(*flags, type=kind, required=is_required, default=default, help=text)
    parser.add_argument("--split", choices=SPLITS, default=defaults["split"], help="default %(default)s")
    parser.add_argument("--prompt", action="append", default=[], help="show a greedy and a drawn continuation of it")
    parser.add_argument("--buckets", type=int, nargs="+", default=defaults["buckets"], help="edges in tokens, from 0")
    parser.add_argument(
        "--suite",
        type=lambda text: tuple(text.split(",")),
        default=defaults["suite"],
        help=f"measurements, separated by commas: {', '.join(PARTS)} (default %(default)s)",
    )
    for name, number, unit in (
        ("passkey_lengths", int, "tokens of a prompt"),
        ("passkey_depths", float, "from 0 to 1"),
    ):
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=number, nargs="+", default=defaults[name], help=f"{unit} (default %(default)s)")
    for name, text in HISTORY_HELP.items():
        flag, explained = "--" + name.replace("_", "-"), f"{text}; none: not measured (default %(default)s)"
        parser.add_argument(flag, type=int, nargs="*", default=defaults[name], help=explained)
    return parser


def parse(argv: Sequence[str]) -> EvalConfig:
    """The evaluation of the options `argv`. Raises ConfigError for invalid values."""
    options = vars(build_parser().parse_args(argv))
    options["prompts"] = options.pop("prompt")
    options.update({name: tuple(options[name]) for name in SEVERAL})
    return EvalConfig(**options)


def log_line(line: str) -> None:
    """Prints progress to standard error: standard output is for the report alone."""
    print(f"nsm eval: {line}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report; exit status 0, or 1 after one line on stderr."""
    try:
        config = parse(sys.argv[1:] if argv is None else argv)
        from nsm_lab.evaluation.run import run_evaluation  # matplotlib, which help does without

        report = run_evaluation(config, log=log_line)
    except NsmError as error:
        print(f"nsm eval: {error}", file=sys.stderr)
        return 1
    print(report.to_markdown(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
