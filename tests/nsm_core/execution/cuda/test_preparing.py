"""An executor for GPUs is prepared, also where its kernels cannot be compiled ahead, and its check is made once."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from nsm_core.execution.cuda import preparing

compiling = pytest.importorskip("nsm_core.execution.cuda.compiling", reason="the compiler is not installed")
from nsm_core.execution.cuda.start_note import MOST_NOTES, StartNote  # noqa: E402  imports the compiler


class Kernels:
    """They compute `bits`, or fail, and are right if the bits are."""

    def __init__(self, bits: str | None = "right") -> None:
        self.bits, self.num_checks = bits, 0

    def computed(self) -> str:
        if self.bits is None:
            raise RuntimeError("a kernel\nfailed")
        return self.bits

    def failed_check(self) -> str | None:
        self.num_checks += 1
        return None if self.bits == "right" else "wrong numbers"


def reason_of(kernels: Kernels, note: StartNote | None) -> str | None:
    return preparing.checked(kernels, Kernels.failed_check, Kernels.computed, note)[0]


def test_kernels_that_cannot_be_compiled_ahead_are_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(launch: object, *, note: object) -> int:
        raise AttributeError("another version\nof the compiler")

    monkeypatch.setattr(compiling, "compile_ahead", fails)
    with caplog.at_level(logging.WARNING, logger="nsm.execution"):
        assert preparing._compile_ahead(lambda: None, None) == 0
    assert caplog.messages == ["kernels are compiled at their first launch: AttributeError: another version"]


def test_bits_of_an_earlier_check_stand_for_the_check_and_no_others_do(tmp_path: Path) -> None:
    note = StartNote(tmp_path / "nsm-1")
    first, again, wrong = Kernels(), Kernels(), Kernels("wrong")
    assert [reason_of(kernels, note) for kernels in (first, again, wrong)] == [None, None, "wrong numbers"]
    assert [kernels.num_checks for kernels in (first, again, wrong)] == [1, 0, 1]
    assert note.read() == "right"  # a check that failed leaves no bits


def test_bits_that_cannot_be_computed_or_kept_are_checked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    note = StartNote(tmp_path / "nsm-1")
    note.write("right")
    broken = Kernels(None)
    with caplog.at_level(logging.WARNING, logger="nsm.execution"):
        assert reason_of(broken, note) == "wrong numbers"
    assert caplog.messages == ["the kernels are checked again: RuntimeError: a kernel"]
    unknown = Kernels("")
    assert reason_of(unknown, StartNote(tmp_path / "nsm-2")) == "wrong numbers"
    (tmp_path / "file").touch()
    for where in (None, StartNote(tmp_path / "file" / "nsm-1")):
        unkept = Kernels()
        assert [reason_of(unkept, where), reason_of(unkept, where)] == [None, None]
        assert unkept.num_checks == 2


def test_a_cache_keeps_the_last_notes_and_everything_else(tmp_path: Path) -> None:
    (tmp_path / "nsm-directory").mkdir()
    (tmp_path / "kernel").touch()
    for number in range(MOST_NOTES + 3):
        note = StartNote(tmp_path / f"nsm-{number}")
        note.write(str(number))
    assert note.read() == str(MOST_NOTES + 2)
    assert len(list(tmp_path.iterdir())) == MOST_NOTES + 2
