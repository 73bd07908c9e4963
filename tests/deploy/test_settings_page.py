"""docs/settings.md is what its command writes, and no setting is missing from it."""

from __future__ import annotations

from deploy.docs.settings import MORE, PAGE, SECTIONS, page
from service.settings import Settings


def test_the_page_is_current() -> None:
    """Otherwise: python -m deploy.docs.settings"""
    assert PAGE.read_text("utf-8") == page()


def test_every_setting_has_one_row() -> None:
    rows = [line for line in page().splitlines() if line.startswith("| `NSM_")]
    assert [row.split("`")[1] for row in rows] == [f"NSM_{name.upper()}" for name in Settings.model_fields]


def test_sections_and_links_are_of_settings_that_there_are() -> None:
    assert {*SECTIONS, *MORE} <= set(Settings.model_fields)
    assert next(iter(SECTIONS)) == next(iter(Settings.model_fields))
