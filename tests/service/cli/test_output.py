from __future__ import annotations

import io
import json

import pytest

from service.cli.output import note, print_fields, print_json, printable, write_text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_nothing_that_it_would_obey(monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = "a\x1b[2J\x07\x9b31m\x7f\r\n\tb é 😀"
    terminal, pipe = Terminal(), io.StringIO()
    for out in (terminal, pipe):
        monkeypatch.setattr("sys.stdout", out)
        write_text(hostile)
    assert terminal.getvalue() == "a\ufffd[2J\ufffd\ufffd31m\ufffd\ufffd\n\tb é 😀"
    assert pipe.getvalue() == hostile


def test_text_without_control_characters_stays_as_it_is() -> None:
    text = "".join(map(chr, (*range(0x20, 0x7F), *range(0xA0, 0xD800), *range(0xE000, 0x11000))))
    assert printable(text) == text


def test_notes_stay_off_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    note("beside\x07 it")
    assert capsys.readouterr() == ("", "beside\ufffd it\n")


def test_fields_are_aligned_and_long_ones_go_on_below(capsys: pytest.CaptureFixture[str]) -> None:
    print_fields({"a": "1", "longer": "2\n3"})
    assert capsys.readouterr().out == "a       1\nlonger  2\n        3\n"


def test_json_keeps_letters_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"text": "é\x1b"})
    out = capsys.readouterr().out
    assert "é" in out
    assert "\x1b" not in out
    assert json.loads(out) == {"text": "é\x1b"}
