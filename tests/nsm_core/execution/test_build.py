"""Compiling the native kernels: once for each state of the sources, and never while a server runs."""

from __future__ import annotations

import fcntl
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nsm_core.execution.native import build

SOURCE = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library of one small file, in a directory of its own."""
    directory = tmp_path / "src"
    directory.mkdir()
    (directory / "api.cpp").write_text(SOURCE)
    monkeypatch.setattr(build, "SOURCES", directory)
    monkeypatch.setattr(build, "LIBRARIES", tmp_path / "build")
    monkeypatch.setattr(build, "UNITS", {"api.cpp": ("-O0",)})
    return directory


needs_compiler = pytest.mark.skipif(build.find_compiler() is None, reason="there is no C++ compiler")


@needs_compiler
def test_a_library_is_made_once_and_replaced_when_its_sources_change(sources: Path) -> None:
    first = build.build()
    made_at = first.stat().st_mtime_ns
    assert build.build() == first == build.library_path()
    assert first.stat().st_mtime_ns == made_at
    (sources / "api.cpp").write_text(SOURCE.replace("42", "43"))
    assert build.library_path() != first
    second = build.build()
    assert [file.name for file in first.parent.iterdir()] == [second.name]


@needs_compiler
def test_what_a_killed_build_left_behind_goes_at_the_next(sources: Path) -> None:
    left = sources.parent / "build" / "tmpabcd1234"
    left.mkdir(parents=True)
    (left / "api.o").write_bytes(b"cut")
    made = build.build()
    assert list(made.parent.iterdir()) == [made]


@needs_compiler
def test_builds_at_one_time_compile_once(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both see that there is no library before either begins."""
    both, compiled, found = threading.Barrier(2, timeout=60), [], build.find_compiler()

    def find_compiler() -> str | None:
        both.wait()
        return found

    def compile_unit(compiler: str, unit: str, directory: Path) -> Path:
        compiled.append(unit)
        return compile_really(compiler, unit, directory)

    compile_really = build._compile
    monkeypatch.setattr(build, "find_compiler", find_compiler)
    monkeypatch.setattr(build, "_compile", compile_unit)
    with ThreadPoolExecutor(2) as threads:
        results = [threads.submit(build.build) for _ in range(2)]
    assert [result.result() for result in results] == [build.library_path()] * 2
    assert compiled == ["api.cpp"]


@needs_compiler
def test_without_locks_nothing_of_another_build_is_removed(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError("no locks here")

    running = sources.parent / "build" / "tmpabcd1234"
    running.mkdir(parents=True)
    monkeypatch.setattr(fcntl, "flock", refuse)
    assert build.build().exists()
    assert running.exists()


@needs_compiler
def test_options_that_an_older_compiler_lacks_are_left_out(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "OPTIONAL", ("-mno-such-tiles",))
    monkeypatch.setattr(build, "UNITS", {"api.cpp": ("-O0", "-mno-such-tiles")})
    assert build.build().exists()


@needs_compiler
def test_build_error_contains_the_compilers_message(sources: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (sources / "api.cpp").write_text("this is no C++\n")
    assert build.main() == 1
    assert "not built, models run slower" in (message := capsys.readouterr().err)
    assert "error" in message
    assert list((sources.parent / "build").iterdir()) == []


def test_build_without_a_compiler_names_the_missing_package(
    sources: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    assert build.main() == 1
    assert "there is no C++ compiler; Debian has one in the package g++" in capsys.readouterr().err
    assert not build.library_path().exists()
