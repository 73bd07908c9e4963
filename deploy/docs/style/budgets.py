"""How many words a page of docs/ may have. A page that needs more replaces text, or a person raises its budget."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path

BUDGETS = Path(__file__).with_name("budgets.toml")


def read_budgets() -> dict[str, int]:
    """Words by file name."""
    budgets: dict[str, int] = tomllib.loads(BUDGETS.read_text("utf-8"))
    return budgets


def over_budget(pages: Iterable[Path]) -> list[str]:
    """A line for each page with more words than its budget, or without one; words are split at white space."""
    budgets = read_budgets()
    faults = []
    for page in pages:
        words, budget = len(page.read_text("utf-8").split()), budgets.get(page.name)
        if budget is None:
            faults.append(f"{page.name}: no budget in {BUDGETS.name}")
        elif words > budget:
            faults.append(f"{page.name}: {words} words, budget {budget}")
    return faults
