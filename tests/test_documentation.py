"""Every link of the documentation leads somewhere, read as Markdown reads it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from deploy.docs.style.budgets import over_budget, read_budgets
from deploy.docs.style.measure import MAX_MEAN, MAX_P90, style_of

ROOT = Path(__file__).resolve().parent.parent
FOLDERS_OF_PAGES = ("docs", "deploy", "benchmarks", "examples")
PAGES = sorted([*ROOT.glob("*.md"), *(page for name in FOLDERS_OF_PAGES for page in (ROOT / name).rglob("*.md"))])
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
# Files that a reader writes who follows the page
EXAMPLES = {
    "nsm_core/model/moving_average.py",
    "nsm_core/ops/moving_average/__init__.py",
    "tests/nsm_core/ops/test_moving_average.py",
    "average.py",
    "kernel.py",
    "reference.py",
}
FOLDERS = (*PACKAGES, "deploy", "loadtests", "benchmarks", "model_repository", "tests")


def test_the_architecture_names_every_package() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    packages = [init.parent for top in PACKAGES for init in (ROOT / top).glob("*/__init__.py")]
    assert [package for package in packages if f"`{package.relative_to(ROOT)}`" not in text] == []


@pytest.mark.parametrize("page", ["architecture.md", "extending.md"])
def test_every_path_of_a_page_for_developers_exists(page: str) -> None:
    """A bare file name may be that of a file in any folder, a path begins at the root."""
    text = (ROOT / "docs" / page).read_text("utf-8")
    named = set(re.findall(r"`([\w.-]+/[\w./-]*|[\w-]+\.(?:py|toml))(?:::\w+)?`", text)) - EXAMPLES
    files = {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    assert sorted(name for name in named if not (ROOT / name).exists() and name not in files) == []


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    """And what is no link in code is one outside of it."""
    page = tmp_path / "page.md"
    page.write_text(
        "# One, two\n\n[a](#one-two) [b](#three) [c](nowhere.md) [d](https://e.org) `[NW](WNL)` [NW](WNL)\n"
    )
    assert dead_links_of(page) == ["#three", "nowhere.md", "WNL"]


STYLED = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
NAME_SOURCES = frozenset(("architecture.md", "extending.md"))  # pages for those who change the code
SOURCE = re.compile(r"`(?:nsm_core|service|nsm_lab)/[\w/]+\.(?:py|cpp|inc)`")


@pytest.mark.parametrize("page", STYLED, ids=lambda page: page.name)
def test_page_has_short_sentences_and_lines_and_no_history(page: Path) -> None:
    """`python -m deploy.docs.style` prints the same for all pages."""
    style = style_of(page.read_text("utf-8"))
    assert style.mean <= MAX_MEAN
    assert style.p90 <= MAX_P90
    assert (style.long_lines, style.history, style.idiom) == ((), (), ())


@pytest.mark.parametrize("page", [page for page in STYLED if page.name not in NAME_SOURCES], ids=lambda page: page.name)
def test_page_for_users_names_no_source_file(page: Path) -> None:
    assert SOURCE.findall(page.read_text("utf-8")) == []


def test_readme_fits_on_two_screens() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").split()) <= 500


def test_page_keeps_its_budget_of_words() -> None:
    """`python -m deploy.docs.style` shows the words of each page."""
    pages = sorted((ROOT / "docs").glob("*.md"))
    assert over_budget(pages) == []
    assert sorted(read_budgets()) == [page.name for page in pages]


def test_page_over_or_without_budget_is_reported(tmp_path: Path) -> None:
    index, other = tmp_path / "index.md", tmp_path / "other.md"
    index.write_text("word " * (read_budgets()["index.md"] + 1))
    other.write_text("one")
    assert over_budget([index]) == [
        f"index.md: {read_budgets()['index.md'] + 1} words, budget {read_budgets()['index.md']}"
    ]
    assert over_budget([other]) == ["other.md: no budget in budgets.toml"]


def test_style_counts_words_of_sentences_outside_of_code_headings_and_tables() -> None:
    prose = "# A heading\n\nOne two three. `Code here` is four words.\n\n```sh\nx y z\n```\n"
    style = style_of(f"{prose}\n| a b |\n| --- |\n| c d e. F g |\n")
    assert style.sentences == (3, 4)
    assert sorted(style.cells) == [2, 2, 3]
    assert style_of(f"{'x' * 121}\n").long_lines == (1,)
    assert style_of("This was tried before. It is what is said.\n").history == ("was tried",)
    assert style_of("It is what is said.\n").idiom == ("what is",)
