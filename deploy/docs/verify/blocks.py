"""The commands of a page, with the output that the page shows for them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

FENCE = re.compile(r"^```(\w*)\n(.*?)^```|^<!-- verify: (.*?) -->", re.MULTILINE | re.DOTALL)
SHELLS = ("console", "sh", "bash")
NAMED_FILE = re.compile(r"as the file `([\w.]+)`")


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One command of a page. `shown`: the lines of output below it; `file`: a script to be written, not run;
    `is_hidden`: a comment of the page, `<!-- verify: command -->`, which prepares what comes after it.
    """

    page: str
    line: int
    language: str
    command: str
    shown: tuple[str, ...] = ()
    file: str = ""
    is_hidden: bool = False

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def steps_of(path: Path, name: str) -> Iterator[Step]:
    """In the order of the page."""
    text = path.read_text("utf-8")
    for block in FENCE.finditer(text):
        line = text.count("\n", 0, block.start()) + 2
        language, body = block[1], block[2]
        if block[3]:
            yield Step(name, line - 1, "sh", block[3], is_hidden=True)
        elif language == "console":
            yield from _console(name, line, body)
        elif language in SHELLS:
            for offset, command in _commands(body.splitlines()):
                yield Step(name, line + offset, language, command)
        elif language == "python":
            named = NAMED_FILE.search(text[: block.start()].rstrip().rpartition("\n\n")[2])
            yield Step(name, line, language, body, file=named[1] if named else "")


def _console(name: str, line: int, body: str) -> Iterator[Step]:
    """`$ command`, lines that continue it, then what it prints."""
    lines = body.splitlines()
    starts = [number for number, text in enumerate(lines) if text.startswith("$ ")]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        ((_, command),) = list(_commands([lines[start][2:], *lines[start + 1 : end]]))[:1]
        shown = lines[start + 1 + command.count("\n") : end]
        yield Step(name, line + start, "console", command, tuple(text for text in shown if text.strip()))


def _commands(lines: list[str]) -> Iterator[tuple[int, str]]:
    """(offset, command) of each; a backslash at its end continues a line."""
    start, parts = 0, list[str]()
    for number, text in enumerate(lines):
        if not parts:
            start = number
        parts.append(text)
        if text.rstrip().endswith("\\"):
            continue
        command, parts = "\n".join(parts), []
        if command.strip() and not command.lstrip().startswith("#"):
            yield start, command
