"""Measures the prose of Markdown pages: words of sentences, long lines, words of history and private idiom."""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections.abc import Iterator, Sequence

from markdown_it import MarkdownIt
from markdown_it.token import Token

MAX_MEAN, MAX_P90, MAX_LINE = 14.0, 25, 120
FENCE = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
ENDS = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=[\"'(\[`A-Z0-9])")
ABBREVIATION = re.compile(r"\b(e\.g|i\.e|cf|vs)\.")
HISTORY = re.compile(
    r"\b(was|were) tried\b|\bbefore that[,.]|\bwhere it took\b|\bearlier builds?\b|\bformer(ly)?\b|\bused to\b"
    r"|\b(tokens|times?|ms) where it was\b|\bthe build before\b|\bat first\b|\bwhat was done\b",
    re.IGNORECASE,
)
IDIOM = re.compile(r"\bwhat (is|was|are|were|has|have)\b|\bgo(es)? on with\b|\b(is|are) told\b", re.IGNORECASE)


@dataclasses.dataclass(frozen=True, slots=True)
class Style:
    """Words of each sentence of running text, and of each sentence in cells of tables; a span of code is one word."""

    sentences: tuple[int, ...]
    cells: tuple[int, ...]
    long_lines: tuple[int, ...]
    history: tuple[str, ...]
    idiom: tuple[str, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.sentences) if self.sentences else 0.0

    @property
    def p90(self) -> int:
        return percentile(self.sentences, 0.9)


def percentile(numbers: Sequence[int], share: float) -> int:
    """The smallest number that `share` of them do not exceed; 0 for none."""
    ordered = sorted(numbers)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0


def style_of(text: str) -> Style:
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    prose, cells = list(_texts(tokens, in_table=False)), list(_texts(tokens, in_table=True))
    everything = "\n".join(prose + cells)
    return Style(
        sentences=tuple(count for part in prose for count in _sentences(part)),
        cells=tuple(count for part in cells for count in _sentences(part)),
        long_lines=tuple(_long_lines(text)),
        history=tuple(match[0] for match in HISTORY.finditer(everything)),
        idiom=tuple(match[0] for match in IDIOM.finditer(everything)),
    )


def _texts(tokens: Sequence[Token], *, in_table: bool) -> Iterator[str]:
    """Of paragraphs and items of lists, or of cells; headings and code are left out."""
    is_heading = is_table = False
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):
            is_heading = token.type == "heading_open"
        elif token.type in ("table_open", "table_close"):
            is_table = token.type == "table_open"
        elif token.type == "inline" and not is_heading and is_table == in_table:
            yield "".join(_plain(child) for child in token.children or ())


def _plain(token: Token) -> str:
    if token.type == "code_inline":
        return "Code"  # a capital, since it may begin a sentence
    if token.type in ("softbreak", "hardbreak"):
        return " "
    return token.content if token.type == "text" else ""


def _sentences(text: str) -> Iterator[int]:
    """Words of each."""
    for sentence in ENDS.split(ABBREVIATION.sub(r"\1", text)):
        count = sum(any(letter.isalnum() for letter in word) for word in sentence.split())
        if count:
            yield count


def _long_lines(text: str) -> Iterator[int]:
    """Numbers of lines over the limit outside of tables, code, comments and lines that are one link or picture."""
    without_code = FENCE.sub(lambda block: "\n" * block[0].count("\n"), text)
    for number, line in enumerate(without_code.splitlines(), start=1):
        is_free = line.startswith("    ") or line.lstrip().startswith(("|", "!", "<!--"))
        if len(line) > MAX_LINE and not is_free:
            yield number
