"""Conversations and the answers that they must have."""

from __future__ import annotations

from pathlib import Path

from loadtests.scripts import Passages, Script, Scripts, chat_answer, completion_answer, read_scripts


def test_the_smallest_margin_of_an_answer_decides() -> None:
    tops = [{"a": -0.1, "b": -3.0}, {"c": -0.7, "d": -0.69}, {"e": 0.0}]
    body = {"choices": [{"text": "ade", "logprobs": {"top_logprobs": tops}}]}
    text, margin = completion_answer(body)
    assert text == "ade"
    assert round(margin, 6) == 0.01


def test_the_same_of_a_chat() -> None:
    content = [{"top_logprobs": [{"logprob": -0.5}, {"logprob": -1.75}]}, {"top_logprobs": [{"logprob": 0.0}]}]
    body = {"choices": [{"message": {"content": "x"}, "logprobs": {"content": content}}]}
    assert chat_answer(body) == ("x", 1.25)


def test_scripts_survive_the_file_and_are_found_by_length(tmp_path: Path) -> None:
    scripts = Scripts(
        (
            Script("completion", 4, ("a",), ("b",), 16),
            Script("completion", 4, ("c",), ("d",), 64),
            Script("session", 4, ("e", "f"), ("g", "h"), 40),
        )
    )
    scripts.write(tmp_path / "scripts.json")
    found = read_scripts(tmp_path / "scripts.json")
    assert found == scripts
    assert [script.inputs for script in found.nearest(41)] == [("c",)]
    assert [script.inputs for script in found.nearest(1)] == [("a",)]
    assert found.of("session") == [scripts.scripts[2]]


def test_passages_never_end_and_have_about_their_length() -> None:
    passages = Passages(4.0)
    pieces = [passages.take(2000) for _ in range(200)]  # more than the excerpts hold
    assert all(7900 <= len(piece) <= 8100 for piece in pieces)
    assert pieces[0] != pieces[1]
