"""The commands of a page, with the output that the page shows for them."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

FENCE = re.compile(
    r"(?:^<!-- not verified: (?P<reason>[^>]*) -->\n\n)?^```(?P<language>\w*)\n(?P<body>.*?)^```"
    r"|^<!-- verify: (?P<hidden>.*?) -->",
    re.MULTILINE | re.DOTALL,
)
SHELLS = ("console", "sh", "bash")
NAMED_FILE = re.compile(r"as the file `([\w.]+)`")


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One command of a page.

    `shown`: the lines of output below it; `file`: the name of a script to be written, not run; `reason`: why it is not
    run, from a comment before it, `<!-- not verified: reason -->`; `is_hidden`: a comment of the page,
    `<!-- verify: command -->`, which prepares what comes after it.
    """

    page: str
    line: int
    language: str
    command: str
    shown: tuple[str, ...] = ()
    file: str = ""
    reason: str = ""
    is_hidden: bool = False

    @property
    def location(self) -> str:
        return f"{self.page}:{self.line}"


def steps_of(path: Path, name: str) -> Iterator[Step]:
    """In the order of the page."""
    text = path.read_text("utf-8")
    for block in FENCE.finditer(text):
        language, body, reason = block["language"], block["body"], block["reason"] or ""
        if block["hidden"]:
            yield Step(name, text.count("\n", 0, block.start()) + 1, "sh", block["hidden"], is_hidden=True)
            continue
        line = text.count("\n", 0, block.start("language")) + 2
        if language == "console":
            yield from (dataclasses.replace(step, reason=reason) for step in _console(name, line, body))
        elif language in SHELLS:
            for offset, command in _commands(body.splitlines()):
                yield Step(name, line + offset, language, command, reason=reason)
        elif language == "python":
            named = NAMED_FILE.search(text[: block.start()].rstrip().rpartition("\n\n")[2])
            yield Step(name, line, language, body, file=named[1] if named else "", reason=reason)


def _console(name: str, line: int, body: str) -> Iterator[Step]:
    """`$ command`, lines that continue it, then what it prints."""
    lines = body.splitlines()
    starts = [number for number, text in enumerate(lines) if text.startswith("$ ")]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        ((_, command),) = list(_commands([lines[start][2:], *lines[start + 1 : end]]))[:1]
        shown = lines[start + 1 + command.count("\n") : end]
        yield Step(name, line + start, "console", command, tuple(text for text in shown if text.strip()))


def _commands(lines: list[str]) -> Iterator[tuple[int, str]]:
    """(offset, command) of each; a backslash at its end or an open quotation continues a line."""
    start, parts = 0, list[str]()
    for number, text in enumerate(lines):
        if not parts:
            start = number
        parts.append(text)
        is_last = number == len(lines) - 1
        if not is_last and (text.rstrip().endswith("\\") or _is_open("\n".join(parts))):
            continue
        command, parts = "\n".join(parts), []
        if command.strip() and not command.lstrip().startswith("#"):
            yield start, command


def _is_open(command: str) -> bool:
    """Whether it ends inside a quotation."""
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return True
    return False
