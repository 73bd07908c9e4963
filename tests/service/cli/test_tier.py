"""`nsm tier`: a directory that is served like any other model, with smaller states."""

from __future__ import annotations

import json
from pathlib import Path

from nsm_core.model.storage import WeightFormat, save_model
from nsm_core.tokenizer import Tokenizer
from tests.service.cli.conftest import Nsm, assert_one_line, no_model
from tests.support.models import random_model, small_config


def write_whole(path: Path, tokenizer: Tokenizer) -> Path:
    """A model of 8 slots, trained to be read with 4."""
    config = small_config(tokenizer.vocab_size, state_tiers=(4,))
    save_model(random_model(config), tokenizer, path / "whole", WeightFormat.INT8)
    return path / "whole"


def test_a_written_tier_holds_sessions_of_its_own(
    nsm: Nsm, data_dir: Path, tmp_path: Path, tiny_tokenizer: Tokenizer
) -> None:
    whole, small = write_whole(tmp_path, tiny_tokenizer), tmp_path / "small"
    written = nsm("tier", whole, "--states", 4, "--out", small)
    assert written.exit_code == 0, written.stderr
    facts = {path: json.loads(nsm("info", "--model", path, "--json").stdout) for path in (whole, small)}
    sizes = [facts[path]["state_bytes"] for path in (whole, small)]
    assert written.stderr == f"{small}: a state has {sizes[1]:,} bytes, of the model {sizes[0]:,}\n"
    assert sizes[1] < sizes[0]
    assert [facts[path]["num_states"] for path in (whole, small)] == [8, 4]
    options = ("--session", "mine", "--max-tokens", 4)
    assert nsm("chat", "--model", small, *options, stdin="Hello").exit_code == 0
    again = nsm("chat", "--model", whole, *options, stdin="Hello")
    assert "session 'mine' was made by model" in again.stderr
    assert nsm("chat", "--model", small, *options, stdin="Hello").exit_code == 0


def test_a_size_that_was_not_trained_for_is_noted(nsm: Nsm, tmp_path: Path, tiny_tokenizer: Tokenizer) -> None:
    written = nsm("tier", write_whole(tmp_path, tiny_tokenizer), "--states", 2, "--out", tmp_path / "small")
    assert written.exit_code == 0
    assert written.stderr.startswith("the model was not trained to be read with 2 states: expect a loss\n")


def test_wrong_arguments_are_refused_in_one_line(nsm: Nsm, tmp_path: Path, tiny_tokenizer: Tokenizer) -> None:
    whole = write_whole(tmp_path, tiny_tokenizer)
    result = nsm("tier", whole, "--states", 8, "--out", tmp_path / "small")
    assert_one_line(
        result,
        "the model has no tier of 8 states: state_tiers must be rising numbers below num_memory_slots (8), got [8]",
    )
    result = nsm("tier", whole, "--states", 4, "--out", whole)
    assert_one_line(result, f"{whole} exists and is not an empty directory")
    result = nsm("tier", tmp_path / "nothing", "--states", 4, "--out", tmp_path / "small")
    assert_one_line(result, no_model(tmp_path / "nothing"))
