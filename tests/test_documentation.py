"""Every link of the documentation leads somewhere, read as Markdown reads it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md")])
ELSEWHERE = re.compile(r"[a-z]+:")


def tokens_of(text: str) -> Iterator[Token]:
    """All of them, those inside of paragraphs too."""
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        yield token
        yield from token.children or ()


def targets_of(text: str) -> list[str]:
    """Of links and images."""
    targets = (token.attrGet("href") or token.attrGet("src") for token in tokens_of(text))
    return [str(target) for target in targets if target]


def anchors_of(text: str) -> set[str]:
    """Of the headings, as GitHub names them."""
    tokens = list(tokens_of(text))
    headings = [title for opened, title in itertools.pairwise(tokens) if opened.type == "heading_open"]
    plain = ("".join(part.content for part in title.children or ()) for title in headings)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


def dead_links_of(page: Path) -> list[str]:
    dead = []
    for target in targets_of(page.read_text("utf-8")):
        path, _, anchor = target.partition("#")
        there = page.parent / path if path else page
        is_dead = not there.exists() or (
            anchor and there.suffix == ".md" and anchor not in anchors_of(there.read_text("utf-8"))
        )
        if is_dead and not ELSEWHERE.match(target):
            dead.append(target)
    return dead


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    assert dead_links_of(page) == []


PACKAGES = ("nsm_core", "nsm_lab", "service")
FOLDERS = (*PACKAGES, "deploy", "loadtests", "benchmarks", "model_repository", "tests")


def test_the_architecture_names_every_package_and_no_file_that_is_gone() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    packages = [init.parent for top in PACKAGES for init in (ROOT / top).glob("*/__init__.py")]
    assert [package for package in packages if f"`{package.relative_to(ROOT)}`" not in text] == []
    named = set(re.findall(r"`([\w/]+\.py)`", text))
    sources = [str(path.relative_to(ROOT)) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    assert sorted(name for name in named if not any(f"/{source}".endswith(f"/{name}") for source in sources)) == []


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    """And what is no link in code is one outside of it."""
    page = tmp_path / "page.md"
    page.write_text(
        "# One, two\n\n[a](#one-two) [b](#three) [c](nowhere.md) [d](https://e.org) `[NW](WNL)` [NW](WNL)\n"
    )
    assert dead_links_of(page) == ["#three", "nowhere.md", "WNL"]
