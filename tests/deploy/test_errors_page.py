"""docs/errors.md matches the server's table of errors."""

from __future__ import annotations

from deploy.docs.errors import PAGE, page, types
from service.web.errors import HTTP_CODES, RULES


def test_errors_page_matches_the_table() -> None:
    """Otherwise: python -m deploy.docs.errors"""
    assert PAGE.read_text("utf-8") == page()


def test_every_code_has_a_row() -> None:
    codes = {rule.code for rule in RULES.values() if rule.code} | set(HTTP_CODES.values())
    text = page()
    assert [code for code in codes if f"| `{code}` |" not in text] == []


def test_type_of_every_error_follows_its_status_as_the_page_says() -> None:
    named = dict(part.split(" ") for part in types().replace("`", "").split(", "))
    for rule in RULES.values():
        shown = "5xx" if rule.status >= 500 else str(rule.status)
        assert rule.type == named.get(shown, named["else"]), rule
