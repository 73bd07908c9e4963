"""Whether what a command printed is what its page shows: the words, not the numbers that differ from run to run."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

# Ids, times and counts: they are right if there is one at that place
CHANGING = re.compile(r"(?:(?<![A-Za-z])|(?<=[-_]))[0-9a-f]{6,}(?![A-Za-z])|\d[\d.,:]*(?:e[+-]?\d+)?")
SPACE = re.compile(r"\s+")
ELLIPSIS = "…"
BARS = re.compile(r"[█▏▎▍▌▋▊▉░ ]+")  # of `nsm top` and progress lines


def stale_lines(shown: Sequence[str], printed: str) -> list[str]:
    """The lines of a page that the output does not have, in the page's order; each with the closest line there is."""
    lines = [plain(line) for line in printed.splitlines()]
    start, stale = 0, []
    for line in shown:
        pattern = pattern_of(line)
        found = next((n for n in range(start, len(lines)) if pattern.fullmatch(lines[n])), None)
        if found is not None:
            start = found + 1
        elif line.strip() != ELLIPSIS:
            close = difflib.get_close_matches(plain(line), lines, n=1, cutoff=0.0)
            stale.append(f"{line.strip()}\n      now: {close[0] if close else '(nothing)'}")
    return stale


def shorten(line: str) -> str:
    """A page may show the beginning of an id or a number, and `…` for the rest."""
    return re.sub(r"[\w-]*…", ELLIPSIS, line)


def plain(line: str) -> str:
    return SPACE.sub(" ", BARS.sub(" ", CHANGING.sub("#", line))).strip()


def pattern_of(line: str) -> re.Pattern[str]:
    """`…` in a page fits anything."""
    parts = (re.escape(plain(part)) for part in shorten(line).split(ELLIPSIS))
    return re.compile(r".*".join(rf"\s*{part}\s*" for part in parts))
