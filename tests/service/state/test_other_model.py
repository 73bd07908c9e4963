"""Words for sessions of a model that is not served."""

from __future__ import annotations

import re
from pathlib import Path

from nsm_core.model.bundled import BUNDLED, CHECKPOINTS, REPLACED
from nsm_core.model.identity import fingerprint
from service.state.other_model import other_model, shown_model

OPERATIONS = Path(__file__).resolve().parents[3] / "docs" / "operations.md"


def test_bundled_model_is_named_with_the_command_that_serves_it() -> None:
    running = fingerprint(BUNDLED)
    shown, ways = other_model(fingerprint(CHECKPOINTS / "pulse-books-small"), running)
    assert shown.startswith("pulse-books-small (")
    assert "`nsm serve --model pulse-books-keyed --model pulse-books-small` also continues theirs" in ways


def test_replaced_weights_of_the_default_are_named_with_the_commit_that_has_them() -> None:
    for start, commit in REPLACED.items():
        shown, ways = other_model(start.ljust(64, "0"), fingerprint(BUNDLED))
        assert shown == f"{BUNDLED.name} (earlier weights, {start})"
        assert f"`nsm serve --model {BUNDLED.name} --model before=DIRECTORY` also continues theirs" in ways
        assert f"DIRECTORY is nsm_core/model/checkpoints/{BUNDLED.name} at commit {commit} of the repository" in ways


def test_any_other_model_is_known_by_its_fingerprint() -> None:
    assert shown_model("0123456789abcdef") == "0123456789ab"
    ways = other_model("0" * 64, "1" * 64).ways
    assert ways.endswith("`nsm serve --model RUNNING --model before=DIRECTORY` also continues theirs")


def test_the_page_shows_how_to_get_replaced_weights() -> None:
    page = OPERATIONS.read_text("utf-8")
    (commit,) = re.findall(rf"git archive (\w+) nsm_core/model/checkpoints/{BUNDLED.name} ", page)
    assert commit in REPLACED.values()
