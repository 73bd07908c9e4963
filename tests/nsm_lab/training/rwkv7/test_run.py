"""A training run of RWKV-7: what it writes is a model that the server reads."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from nsm_core.errors import ConfigError
from nsm_core.rwkv7.loader import load_rwkv7
from nsm_core.tokenizer import TOKENIZER_FILE, BpeTokenizer, Tokenizer
from nsm_lab.training.data import Split, tokenize_split
from nsm_lab.training.rwkv7 import run
from nsm_lab.training.rwkv7.__main__ import main, parse
from nsm_lab.training.rwkv7.model import Rwkv7
from nsm_lab.training.rwkv7.run import train
from tests.nsm_lab.training.conftest import WriteCorpus, make_texts

REPOSITORY = Path(__file__).resolve().parents[4]
SIZES = ["--width", "64", "--layers", "2", "--rows", "2", "--seq-len", "32"]


@pytest.fixture
def options(tmp_path: Path, tiny_tokenizer: Tokenizer, write_corpus: WriteCorpus) -> list[str]:
    write_corpus("some-train.jsonl.zst", make_texts(30, max_words=60))
    data = write_corpus("some-val.jsonl.zst", make_texts(12, max_words=60, seed=1))
    tiny_tokenizer.save(tmp_path / TOKENIZER_FILE)
    return ["--data", str(data), "--tokenizer", str(tmp_path / TOKENIZER_FILE), "--out", str(tmp_path / "out"), *SIZES]


def test_a_run_learns_and_its_model_is_the_one_that_the_server_reads(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    untrained = train(parse([*options, "--steps", "1", "--muon-lr", "1e-9", "--adam-lr", "1e-9"]))
    config = parse([*options, "--steps", "12", "--log-every", "6"])
    assert train(config) < untrained - 0.5
    said = capsys.readouterr().err
    assert "step 12 of 12" in said
    assert "hours" not in said
    loaded = load_rwkv7(config.out)
    ids = torch.tensor([loaded.tokenizer.encode("the slow ships came home under the grey sky")])
    hidden, _ = loaded.model.forward(ids, loaded.model.initial_state(1))
    trained = Rwkv7(loaded.model.config.vocab_size, 64, 2)
    trained.load_state_dict({name: loaded.model.tensors[name].float() for name in trained.state_dict()})
    with torch.no_grad():
        expected = trained(ids)
    assert torch.allclose(loaded.model.logits(hidden), expected[..., : loaded.model.num_ids], atol=1e-4)


def test_hours_on_a_cpu_are_said_before_the_first_step(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(run, "CPU_OPERATIONS", 1.0)
    train(parse([*options, "--steps", "1", "--log-every", "1"]))
    said = capsys.readouterr().err
    assert "64 tokens take a CPU at least" in said
    assert said.index("hours: --layers, --width, --rows, --seq-len and --steps") < said.index("step 1 of 1")


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [("--width", "96", "width must be a multiple of 64"), ("--seq-len", "24", "seq_len"), ("--rows", "0", "rows")],
)
def test_sizes_that_no_run_can_have_are_refused(options: list[str], flag: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse([*options, flag, value])


def num_tokens(options: list[str], split: Split) -> int:
    config = parse(options)
    return len(tokenize_split(config.data, split, BpeTokenizer.load(config.tokenizer), config.out / "cache").ids)


def test_corpus_that_is_too_small_names_the_options_and_the_tokens(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    train_tokens, val_tokens = num_tokens(options, "train"), num_tokens(options, "val")
    assert main([*options, "--rows", "64", "--seq-len", "2048"]) == 1
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert f"the train split has {train_tokens} tokens; 64 rows of 2048 (--rows, --seq-len)" in line
    assert f" need {65 * 2048 + 2}: " in line
    length = val_tokens // 16 * 16 + 16
    assert length * 2 < train_tokens
    assert main([*options, "--rows", "1", "--seq-len", str(length)]) == 1
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert f"the val split has {val_tokens} tokens; a row of {length} (--seq-len) needs {length + 2}: " in line


def test_smallest_corpus_of_some_rows_has_a_step(options: list[str]) -> None:
    """Every row that a step asks for is in the text, wherever its epoch begins."""
    length = 16
    rows = (num_tokens(options, "train") - 2) // length - 1
    assert train(parse([*options, "--rows", str(rows), "--seq-len", str(length), "--steps", "2"])) > 0


def test_command_of_the_page_runs_on_the_sample(tmp_path: Path, tiny_tokenizer: Tokenizer) -> None:
    page = (REPOSITORY / "docs" / "training.md").read_text()
    command = next(line for line in page.splitlines() if line.startswith("python -m nsm_lab.training.rwkv7 "))
    tiny_tokenizer.save(tmp_path / TOKENIZER_FILE)
    config = dataclasses.replace(
        parse(command.split()[3:]), tokenizer=tmp_path / TOKENIZER_FILE, out=tmp_path / "out", steps=1
    )
    assert train(dataclasses.replace(config, data=REPOSITORY / config.data)) > 0
