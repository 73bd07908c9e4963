from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from nsm_lab.evaluation.__main__ import main, parse
from nsm_lab.evaluation.config import EvalConfig
from tests.support.samples import BOOKS_DIR


def test_without_options_the_defaults_of_the_config_hold() -> None:
    assert parse(["--data", "books"]) == EvalConfig(data=Path("books"))


def test_every_field_can_be_set() -> None:
    argv = (
        "--data books --model model-dir --split test --max-documents 3 --max-tokens-per-document 4 --segment-len 5 "
        "--batch-documents 6 --executor native --buckets 0 7 9 --device cpu --precision fp32 --prompt one --prompt two "
        "--sample-tokens 8 --seed 9 --output out/report --suite loss,passkey --passkey-lengths 64 128 "
        "--passkey-depths 0.5 --passkey-examples 3 --stored-state-prefix 7 --stored-state-count 2 "
        "--split-tokens 11 --history-starts --history-spans 13 --history-repeats 300 400 "
        "--history-passages 5 --history-contexts 500 --history-distances 14 --history-prompts 6"
    )
    config, defaults = parse(argv.split()), EvalConfig(data=Path())
    for field in dataclasses.fields(EvalConfig):
        assert getattr(config, field.name) != getattr(defaults, field.name)
    assert (config.buckets, config.prompts, config.split) == ((0, 7, 9), ("one", "two"), "test")
    assert (config.suite, config.passkey_lengths, config.passkey_depths) == (("loss", "passkey"), (64, 128), (0.5,))
    assert (config.history_starts, config.history_repeats) == ((), (300, 400))


def test_the_report_is_printed(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--data", str(BOOKS_DIR), "--model", str(checkpoint), "--max-tokens-per-document", "50"]
    assert main([*argv, "--device", "cpu"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("# random-model on val\n")
    first, *parts = captured.err.splitlines()
    assert re.fullmatch(
        r"nsm eval: random-model on val, \d+ documents of [\d,]+ tokens, on cpu: loss, split, slots, samples", first
    )
    assert [line.split(": ")[1] for line in parts] == ["loss", "split", "slots", "samples"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-documents", "0"], "max_documents must be at least 1, got 0"),
        (["--buckets", "5", "9"], "bucket edges must ascend from 0, got [5, 9]"),
        (["--split", "test"], "no test files in "),
    ],
    ids=["field", "buckets", "split"],
)
def test_an_error_is_one_line_on_stderr(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    (tmp_path / "x-val.jsonl").write_text('{"text": "fine"}\n', "utf-8")
    assert main(["--data", str(tmp_path), "--model", str(checkpoint), "--device", "cpu", *options]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"nsm eval: {message}")
    assert captured.err.count("\n") == 1
