from __future__ import annotations

import json
from pathlib import Path

import pytest

from nsm_lab.training.__main__ import build_parser
from tests.service.cli.conftest import Nsm, assert_one_line, no_model
from tests.support.samples import BOOKS_DIR

TINY = (
    "--preset", "tiny", "--d-model", 32, "--num-layers", 2, "--num-heads", 2, "--num-memory-slots", 8,
    "--write-top-k", 2, "--mlp-hidden", 64, "--vocab-size", 512, "--steps", 3, "--rows", 2, "--seq-len", 64,
    "--eval-every", 3, "--eval-batches", 1, "--device", "cpu", "--weight-format", "fp32",
)  # fmt: skip
FEW = ("--max-documents", 2, "--max-tokens", 200, "--device", "cpu")


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:tensorboard")
def test_train_then_eval_then_generate(nsm: Nsm, model_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    trained = nsm("train", "--data", BOOKS_DIR, "--out", out, "--tokenizer", model_dir / "tokenizer.json", *TINY)
    assert trained.exit_code == 0, trained.stderr
    assert trained.stdout.endswith(f"model written to {out}\n")

    report = tmp_path / "reports" / "val"
    measured = nsm("eval", "--model", out, "--data", BOOKS_DIR, "--out", report, *FEW)
    assert measured.exit_code == 0, measured.stderr
    assert measured.stdout == report.with_suffix(".md").read_text("utf-8")
    numbers = json.loads(report.with_suffix(".json").read_text("utf-8"))
    assert numbers["provenance"]["model"] == "run"
    assert numbers["losses"]["num_documents"] == 2
    assert numbers["losses"]["total"]["num_tokens"] == 400

    written = nsm("generate", "Once", "--model", out, "--max-tokens", 5, "--json")
    assert json.loads(written.stdout)["model"] == "run"


def test_eval_measures_the_model_of_the_settings_by_default(nsm: Nsm, other_model_dir: Path, tmp_path: Path) -> None:
    for flags, name in (((), "tiny"), (("--model", other_model_dir), "other")):
        result = nsm("eval", "--data", BOOKS_DIR, "--out", tmp_path / name, *flags, *FEW)
        assert result.stdout.startswith(f"# {name} on val\n")


@pytest.mark.parametrize("command", ["train", "eval"])
def test_help_is_that_of_the_module(nsm: Nsm, command: str) -> None:
    result = nsm(command, "--help")
    assert result.exit_code == 0
    assert result.stdout.startswith(f"usage: nsm {command} ")
    assert "--data DATA" in result.stdout
    assert result.stderr == ""


def test_every_option_of_training_says_what_it_does() -> None:
    texts = [action.help for action in build_parser()._actions if action.dest not in ("help", "preset")]
    assert all(text is not None and len(text.split()) > 1 for text in texts)
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize(
    ("args", "message", "status"),
    [
        (("train",), "the following arguments are required: --data, --out", 2),
        (("train", "--data", ".", "--out", "o", "--steps", "many"), "argument --steps: invalid int value: 'many'", 2),
        (("train", "--data", ".", "--out", "o", "--steps", 0), "steps must be at least 1, got 0", 1),
        (
            ("train", "--data", ".", "--out", "o", "--weight-decay", "nan"),
            "weight_decay must be a number of at least 0, got nan",
            1,
        ),
        (
            ("train", "--data", ".", "--out", "o", "--adam-lr", "inf"),
            "adam_lr must be a finite number above 0, got inf",
            1,
        ),
        (("train", "--data", "/no/such", "--out", "o", "--bogus"), "unrecognized arguments: --bogus", 2),
        (("eval",), "the following arguments are required: --data", 2),
        (("eval", "--data", "/no/such"), "the data directory /no/such does not exist or is not a directory", 1),
        (("eval", "--data", ".", "--model", "/no/such"), no_model("/no/such"), 1),
        (
            ("eval", "--data", ".", "--passkey-lengths", 0, 5),
            "passkey_lengths must be one or more numbers of at least 1 token, got (0, 5)",
            1,
        ),
        (("eval", "--data", ".", "--max-documents", 0), "max_documents must be at least 1, got 0", 1),
    ],
)
def test_bad_options_are_one_line(nsm: Nsm, args: tuple[str | int, ...], message: str, status: int) -> None:
    assert_one_line(nsm(*args), message, status=status)
