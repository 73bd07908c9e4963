"""Prints words, sentences and long lines of each page: `python -m deploy.docs.style [PAGE …]`; all pages by default.

A page of docs/ has a budget of words in budgets.toml. The exit code is 1 if a page is over it, or has none.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from deploy.docs.style.budgets import over_budget
from deploy.docs.style.measure import MAX_LINE, Style, percentile, style_of

ROOT = Path(__file__).resolve().parents[3]


def default_pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main(arguments: Sequence[str]) -> int:
    pages = [Path(name) for name in arguments] or default_pages()
    texts = [page.read_text("utf-8") for page in pages]
    print(f"{'page':<28} words  mean  p90  longest  cells' p90  lines > {MAX_LINE}  history  idiom")
    for page, text in zip(pages, texts, strict=True):
        print(_row(page.name, len(text.split()), style_of(text)))
    print(_row("all", sum(len(text.split()) for text in texts), style_of("\n\n".join(texts))))
    faults = over_budget([page for page in pages if page.parent.name == "docs"])
    for fault in faults:
        print(fault)
    return int(bool(faults))


def _row(name: str, words: int, style: Style) -> str:
    longest = max(style.sentences, default=0)
    return (
        f"{name:<28} {words:>5} {style.mean:>5.1f} {style.p90:>4} {longest:>8} {percentile(style.cells, 0.9):>11}"
        f" {len(style.long_lines):>12} {len(style.history):>8} {len(style.idiom):>6}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
