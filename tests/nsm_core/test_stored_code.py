"""Code from text is compiled once: classes and annotations are the same whether their code was stored or not."""

from __future__ import annotations

import builtins
import collections
import dataclasses
import inspect
import marshal  # noqa: TID251  # what the tests read is what they wrote
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest

from nsm_core import stored_code
from nsm_core.stored_code import storing_code


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    return tmp_path / "made" / "code.texts"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that were compiled while code was stored."""
    texts: list[str] = []

    def note(source: str, *args: Any, **fields: Any) -> Any:
        texts.append(source)
        return compile(source, *args, **fields)

    class Noting:
        compile, eval, exec = staticmethod(note), staticmethod(builtins.eval), staticmethod(builtins.exec)

    monkeypatch.setattr(stored_code, "builtins", Noting)
    return texts


def define() -> tuple[type, type, Any]:
    @dataclasses.dataclass(frozen=True, slots=True, order=True)
    class Point:
        x: int
        names: list[str] = dataclasses.field(default_factory=list)

    def scaled(point: Point, by: collections.OrderedDict[str, int] | None = None) -> int:
        return point.x * len(by or ())

    return Point, collections.namedtuple("Pair", "left right"), scaled


def check(point: Any, pair: Any, scaled: Any) -> None:
    assert repr(point(1)) == f"{point.__qualname__}(x=1, names=[])"
    assert point(1) == point(1, []) < point(2)
    assert hash(pair(1, 2)) == hash((1, 2))
    assert pair(left=1, right=2).right == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        point(1).x = 2
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        point()
    assert inspect.get_annotations(scaled, eval_str=True, locals={"Point": point})["point"] is point
    hints = typing.get_type_hints(scaled, localns={"Point": point})
    assert hints == {"point": point, "by": collections.OrderedDict[str, int] | None, "return": int}


def test_what_was_stored_is_not_compiled_again(path: Path, compiled: list[str]) -> None:
    with storing_code(path):
        check(*define())
    first = len(compiled)
    assert first > 8
    with storing_code(path):
        check(*define())
        assert len(compiled) == first
    define()
    assert len(compiled) == first, "and afterwards all is as before"
    for module in (dataclasses, inspect, collections, typing):
        assert not {"exec", "eval", "compile"} & vars(module).keys()


def test_a_space_before_an_annotation_is_no_error(path: Path) -> None:
    def spaced() -> int:
        return 1

    spaced.__annotations__["return"] = " int"
    with storing_code(path):
        assert inspect.get_annotations(spaced, eval_str=True) == {"return": int}


def test_a_second_caller_stores_in_the_file_of_the_first(path: Path, tmp_path: Path) -> None:
    with storing_code(path):
        with storing_code(tmp_path / "other"):
            define()
        assert hasattr(dataclasses, "exec")
    assert path.exists()
    assert not (tmp_path / "other").exists()


def test_only_what_is_new_is_written(path: Path) -> None:
    with storing_code(path):
        define()
    written = path.stat().st_mtime_ns, path.read_bytes()
    with storing_code(path):
        define()
    assert (path.stat().st_mtime_ns, path.read_bytes()) == written
    with storing_code(path):
        dataclasses.make_dataclass("New", ["an_attribute_that_is_new"])
    assert len(path.read_bytes()) > len(written[1])
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("content", [b"", b"of another Python", stored_code.importlib.util.MAGIC_NUMBER + b"\xff\x00"])
def test_a_file_that_cannot_be_read_is_written_anew(path: Path, content: bytes, compiled: list[str]) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    for _ in range(2):
        with storing_code(path):
            check(*define())
    assert len(compiled) == len(set(compiled))


def test_texts_of_old_versions_go_when_there_are_too_many(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_code, "MAX_TEXTS", 12)
    for number in range(6):
        with storing_code(path):
            dataclasses.make_dataclass("Old", [f"attribute_{number}"])
    stored = marshal.loads(path.read_bytes()[len(stored_code.importlib.util.MAGIC_NUMBER) :])
    assert 0 < len(stored) <= 12
    assert any("attribute_5" in text for _, text in stored)


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, path: Path) -> None:
    (tmp_path / "made").write_text("a file")
    with storing_code(path):
        check(*define())


def test_nothing_is_written_where_python_writes_no_modules(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    with storing_code(path):
        check(*define())
    assert not path.exists()


def test_errors_leave_no_trace(path: Path) -> None:
    with pytest.raises(SyntaxError), storing_code(path):
        typing.ForwardRef("no type")
    assert not hasattr(typing, "compile")
    assert not path.exists()


def test_the_file_is_among_compiled_modules(tmp_path: Path) -> None:
    code = "from nsm_core.stored_code import code_file; print(code_file())"
    command = [sys.executable, "-X", f"pycache_prefix={tmp_path}", "-c", code]
    assert subprocess.check_output(command, text=True).startswith(str(tmp_path))
