"""Which commands of the pages are run, and why the others are not."""

from __future__ import annotations

import dataclasses
import re

# The first that fits decides. What is not run is still held against the program's own options, see `options_of`
NOT_RUN: tuple[tuple[str, str], ...] = (
    (r"\b(docker|kubectl|helm|trtexec|torchrun|perf-analyzer|prometheus)\b", "another program"),
    (r"\b(llama-server|lm_eval|aiperf)\b", "another program"),
    (r"\bmake (test|soak|verify-docs|docs|image-test|loadtest|audit|lock|triton|bench-gate)\b", "tested elsewhere"),
    (r"\bcp \.env|\bpip install|\bapt", "changes the machine"),
    (r"gateway-?\d?:|gpu-\d|load-1|/srv/models|\bnightly|\$OURS|:(8001|8003|8080)\b|redis://", "other servers"),
    (r"\blocust\b|-m loadtests", "load"),
    (r"\bnsm (train|eval|bench)\b|nsm_lab\.|-m benchmarks|\breports/", "minutes of processor time"),
    (r"…|PASSWORD|\bIMAGE\b|<|MODEL_DIR", "has a part for the reader to fill in"),
    (r"(?<!\| )\bnsm chat\b|\bnsm triton\b|\bnsm top\b(?!.*--once)", "for a person at a terminal"),
    (r"-m deploy\.|\bgit\b", "writes into the checkout"),
)  # fmt: skip
PROGRAM = re.compile(
    r"(?:^|[|&;]\s*|\w+=\S+ )(?:\.venv/bin/)?"
    r"(nsm (?:sessions |keys |triton |bench |model )?[a-z]+|python -m (?:nsm_lab|benchmarks|loadtests)[\w.]*)"
)
OPTION = re.compile(r"(?<=\s)--[a-z][a-z-]*")
COMMENT = re.compile(r"\s+# .*$", re.MULTILINE)


@dataclasses.dataclass(frozen=True, slots=True)
class Known:
    """A program that can be asked for its options, and those that a page gives it."""

    program: str
    options: tuple[str, ...]


def why_not(command: str) -> str:
    """Why a command is not run; empty for one that is."""
    return next((reason for pattern, reason in NOT_RUN if re.search(pattern, command)), "")


def without_comment(command: str) -> str:
    return COMMENT.sub("", command)


def options_of(command: str) -> Known | None:
    """None for another program, or without options."""
    plain = without_comment(command).replace("\\\n", " ")
    found = PROGRAM.search(plain)
    options = tuple(dict.fromkeys(OPTION.findall(plain)))
    return Known(found[1], options) if found and options else None
