from __future__ import annotations

import json
from pathlib import Path

from nsm_core.tokenizer import Tokenizer
from tests.service.cli.conftest import Nsm, assert_one_line, id_of


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
