from __future__ import annotations

import json
from pathlib import Path

import pytest

from nsm_core.tokenizer import Tokenizer
from tests.service.cli.conftest import Nsm, assert_one_line, id_of
from tests.support.rwkv7 import save_rwkv7


def test_a_text_as_a_table_and_as_json(nsm: Nsm, tiny_tokenizer: Tokenizer) -> None:
    text = "Once upon a time"
    answer = json.loads(nsm("inspect", text, "--json").stdout)
    assert (answer["position"], answer["num_tokens"]) == (0, 1 + len(tiny_tokenizer.encode(text)))
    assert [len(layer["states"]) for layer in answer["layers"]] == [8, 8]
    lines = nsm("inspect", text).stdout.splitlines()
    assert lines[0] == f"{answer['num_tokens']} tokens on top of 0"
    assert lines[1].split()[:3] == ["layer", "kind", "entropy"]
    assert len(lines) == 4


def test_a_page_and_a_picture_are_written(nsm: Nsm, tmp_path: Path) -> None:
    page, picture = tmp_path / "states.html", tmp_path / "states.png"
    result = nsm("inspect", "Say <b>it</b>", "--html", page, "--png", picture, "--token", 2)
    assert result.exit_code == 0
    assert "<b>" not in page.read_text("utf-8")
    assert "Layer 1 (slots)" in page.read_text("utf-8")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_file_and_standard_input_are_read_as_they_are(nsm: Nsm, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("Once upon a time", "utf-8")
    wanted = nsm("inspect", "Once upon a time", "--json").stdout
    assert nsm("inspect", "--file", file, "--json").stdout == wanted
    assert nsm("inspect", "-", "--json", stdin="Once upon a time\n").stdout == wanted


def test_long_text_is_cut_with_a_note(nsm: Nsm) -> None:
    result = nsm("inspect", "word " * 50, "--max-tokens", 20, "--json")
    assert json.loads(result.stdout)["num_tokens"] == 20
    assert result.stderr.startswith("the first 20 of ")


def test_the_last_tokens_of_a_session(nsm: Nsm) -> None:
    session_id = id_of(nsm("chat", "--max-tokens", 4, stdin="Hello there, my friend").stderr)
    position = json.loads(nsm("sessions", "show", session_id, "--json").stdout)["position"]
    answer = json.loads(nsm("inspect", "--session", session_id, "--max-tokens", 6, "--json").stdout)
    assert (answer["position"], answer["num_tokens"]) == (position - 6, 6)
    whole = json.loads(nsm("inspect", "--session", session_id, "--json").stdout)
    assert (whole["position"], whole["num_tokens"]) == (0, position)


def test_wrong_wishes_are_one_line(nsm: Nsm) -> None:
    assert "give one of a text, --file and --session" in nsm("inspect").stderr
    assert nsm("inspect", "a", "--session", "s").exit_code == 2
    assert_one_line(nsm("inspect", "--session", "nobody"), "session 'nobody' does not exist")
    assert nsm("inspect", "a", "--token", 50, "--html", "never.html").exit_code == 1
    assert not Path("never.html").exists()
    result = nsm("inspect", "a", "--token", 0)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "give --html or --png" in result.stderr


@pytest.fixture
def rwkv7_model(tmp_path: Path, tiny_tokenizer: Tokenizer) -> Path:
    return save_rwkv7(tmp_path / "rwkv7", tiny_tokenizer)


def test_heads_of_rwkv7_have_norms_and_decays(nsm: Nsm, rwkv7_model: Path) -> None:
    answer = json.loads(nsm("inspect", "Once upon a time", "--model", rwkv7_model, "--json").stdout)
    assert [(layer["kind"], len(layer["heads"])) for layer in answer["layers"]] == [("matrix", 4), ("matrix", 4)]
    heads = [head for layer in answer["layers"] for head in layer["heads"]]
    assert all(head["norm"] > 0 and 0.5 < head["decay"] < 1 and head["half_life"] > 1 for head in heads)
    lines = nsm("inspect", "Once upon a time", "--model", rwkv7_model).stdout.splitlines()
    assert lines[0] == f"{answer['num_tokens']} tokens on top of 0"
    assert lines[1].split() == ["layer", "kind", "norm", "decay", "half-life", "shortest", "longest"]
    assert [line.split()[:2] for line in lines[2:]] == [["0", "matrix"], ["1", "matrix"]]


def test_a_session_of_rwkv7_ends_with_the_norms_of_its_text(nsm: Nsm, rwkv7_model: Path) -> None:
    own = ("--model", rwkv7_model)
    session_id = id_of(nsm("chat", *own, "--max-tokens", 4, stdin="Hello there, my friend").stderr)
    last, whole = (
        json.loads(nsm("inspect", *own, "--session", session_id, "--max-tokens", number, "--json").stdout)
        for number in (3, 256)
    )
    assert (last["num_tokens"], last["position"] + 3) == (3, whole["num_tokens"])
    norms = [[head["norm"] for layer in answer["layers"] for head in layer["heads"]] for answer in (last, whole)]
    assert norms[0] == pytest.approx(norms[1], rel=0.05)  # the session's state comes from int8 kernels


def test_a_picture_of_rwkv7_is_refused(nsm: Nsm, rwkv7_model: Path, tmp_path: Path) -> None:
    result = nsm("inspect", "a", "--model", rwkv7_model, "--png", tmp_path / "never.png")
    assert_one_line(result, "rwkv7 has no memory slots to draw: leave out --html and --png")
