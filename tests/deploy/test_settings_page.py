"""docs/settings.md matches the definitions in service/settings.py."""

from __future__ import annotations

from deploy.docs.settings import PAGE, page
from service.settings import Settings


def test_settings_page_matches_the_definitions() -> None:
    """Otherwise: python -m deploy.docs.settings"""
    assert PAGE.read_text("utf-8") == page()


def test_every_setting_has_one_row() -> None:
    rows = [line for line in page().splitlines() if line.startswith("| `NSM_")]
    assert [row.split("`")[1] for row in rows] == [f"NSM_{name.upper()}" for name in Settings.model_fields]
