"""Stores code that the standard library compiles from text while modules are imported, as Python stores their own.

A dataclass writes its methods as text when it is defined, and annotations are text that somebody evaluates: 2,000 texts
in a start of the server, whose compilation took a fifth of its CPU time.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import dataclasses
import importlib.util
import inspect
import marshal  # noqa: TID251  # its file is one of Python's compiled modules, which run too
import os
import sys
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType
from typing import Any

MAX_TEXTS = 20_000  # a file with more starts anew: old versions of modules leave theirs behind
FILENAME = "<string>"  # of code from text, in tracebacks


@contextlib.contextmanager
def storing_code(path: Path | None = None) -> Iterator[None]:
    """Meanwhile texts that a file (None: the one among Python's compiled modules) has the code of are not compiled.

    At the end it is written with what is new. No error when it cannot be read or written: then all is compiled.
    """
    path = path or code_file()
    if path is None or hasattr(dataclasses, "exec"):  # a caller stores code already
        yield
        return
    stored = StoredCode(path)
    with (
        _calling(dataclasses, exec=stored.exec),
        _calling(inspect, eval=stored.eval),
        _calling(collections, eval=stored.eval),
        _calling(typing, compile=stored.compile),
    ):
        yield
    if not sys.dont_write_bytecode:
        stored.save()


def code_file() -> Path | None:
    """None: this Python stores no compiled modules."""
    try:
        return Path(importlib.util.cache_from_source(__file__)).with_suffix(".texts")
    except NotImplementedError:
        return None


class StoredCode:
    """The code of texts, by mode of compilation and text."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._codes = _read(path)
        self._new: dict[tuple[str, str], CodeType] = {}

    def exec(self, source: str, globals: dict[str, Any] | None = None, locals: Mapping[str, Any] | None = None) -> None:
        """As the function of that name, called by `dataclasses`."""
        builtins.exec(self.compile(source, FILENAME, "exec"), vars(dataclasses) if globals is None else globals, locals)

    def eval(self, source: str | CodeType, globals: dict[str, Any], locals: Mapping[str, Any] | None = None) -> Any:
        """As the function of that name."""
        if isinstance(source, str):
            source = self.compile(source.lstrip(" \t"), FILENAME, "eval")
        return builtins.eval(source, globals, locals)

    def compile(self, source: str, filename: str, mode: str) -> CodeType:
        """As the function of that name. Raises SyntaxError."""
        if filename != FILENAME:
            return builtins.compile(source, filename, mode, dont_inherit=True)
        key = (mode, source)
        code = self._codes.get(key) or self._new.get(key)
        if code is None:
            code = self._new[key] = builtins.compile(source, filename, mode, dont_inherit=True)
        return code

    def save(self) -> None:
        """What is new joins the file. Another process may do so at the same time: one of the two files stays."""
        if not self._new:
            return
        old = self._codes if len(self._codes) + len(self._new) <= MAX_TEXTS else {}
        partial = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(importlib.util.MAGIC_NUMBER + marshal.dumps({**old, **self._new}))
            os.replace(partial, self._path)


def _read(path: Path) -> dict[tuple[str, str], CodeType]:
    """Nothing if there is no file, or another Python wrote it."""
    magic = importlib.util.MAGIC_NUMBER
    try:
        data = path.read_bytes()
        return dict(marshal.loads(data[len(magic) :])) if data.startswith(magic) else {}
    except (OSError, EOFError, ValueError, TypeError):
        return {}


@contextlib.contextmanager
def _calling(module: Any, **functions: Any) -> Iterator[None]:
    """Meanwhile the module's own code calls these functions in place of built-in ones of their names."""
    for name, function in functions.items():
        setattr(module, name, function)
    try:
        yield
    finally:
        for name in functions:
            delattr(module, name)
