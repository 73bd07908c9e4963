"""Identifiers use the words of docs/concepts.md and docs/architecture.md. Each banned word names the one to use."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("nsm_core", "service", "nsm_lab", "benchmarks", "loadtests", "deploy", "examples", "tests")
BANNED = {
    "wish": "option, params or message",
    "wishes": "options, params or messages",
    "told": "reported, or the thing itself",
    "untold": "omitted",
    "tell": "report",
    "tells": "reports",
    "place": "position, path or location",
    "places": "positions, paths or locations",
    "look": "capture, sample or read",
    "looks": "captures or samples",
    "kept": "retained, stored or held",
    "keeps": "retains or stores",
    "reframer": "EventReplayer",
    "reframing": "detokenize",
    "framing": "render_options",
    "forms": "tiers, formats or variants",
    "hindrance": "OverlapBlockers",
    "hindrances": "OverlapBlockers",
    "settle": "final_event or commit_or_fail",
    "settled": "final or finished",
    "parking": "stored_state_quality",
    "parked": "stored",
    "harmless": "ignored",
    "twin": "shared_copy",
    "upcoming": "next_inputs",
    "lent": "reserved",
    "claim": "ownership",
    "claimed": "owned",
    "house": "server, fixture or the thing itself",
}


PUBLIC = {"kept_states_mb"}  # a parameter of the Triton model, which users write
FIELD_TERMS = re.compile("in_place")  # as in every tensor library


def words_of(name: str) -> list[str]:
    parts = [re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", part) for part in FIELD_TERMS.sub("", name).split("_")]
    return [word.lower() for part in parts for word in part]


def defined_names(path: Path) -> Iterator[tuple[int, str]]:
    """Line and name of everything that a file names itself, and the file."""
    yield 0, path.stem
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


@pytest.mark.parametrize("folder", FOLDERS)
def test_identifiers_use_the_words_of_the_pages(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} {name}: say {BANNED[word]}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, name in defined_names(path)
        for word in words_of(name)
        if word in BANNED and name not in PUBLIC and not name.startswith("test_")
    ]
    assert found == []


def test_banned_words_are_found_in_any_notation() -> None:
    assert words_of("WishList_of_HTTPPlaces2") == ["wish", "list", "of", "http", "places"]
    assert words_of("attend_in_place") == ["attend"]
