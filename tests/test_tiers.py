"""The table of tiers names tests that are there, and every service is met before `make soak`."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.order import LONGEST, longest_first
from tests.support.tiers import ROOT, Tier, Tiers, is_below


def test_every_name_in_the_table_is_a_folder_a_file_or_a_test() -> None:
    missing = []
    for prefix in Tiers.load().prefixes:
        path, _, test = prefix.partition("::")
        function = test.partition("[")[0]
        if not (ROOT / path).exists() or (function and f"def {function}(" not in (ROOT / path).read_text("utf-8")):
            missing.append(prefix)
    assert sorted(missing) == []


def test_the_longest_name_decides() -> None:
    tiers = Tiers(
        {"fast": ["tests/a"], "test": ["tests/a/b.py"], "soak": ["tests/a/b.py::test_c", "tests/a/b.py::test_d[1]"]}
    )
    assert tiers.of_id("tests/a/x.py::test_c") == Tier.FAST
    assert tiers.of_id("tests/a/b.py::test_x") == Tier.TEST
    assert tiers.of_id("tests/a/b.py::test_c[2]") == Tier.SOAK
    assert tiers.of_id("tests/a/b.py::test_d[2]") == Tier.TEST
    assert tiers.of_id("tests/z.py::test_c") == Tier.TEST


def test_a_folder_may_hold_tests_of_an_earlier_tier() -> None:
    tiers = Tiers({"fast": ["tests/a/b/c.py"], "test": [], "soak": ["tests/a"]})
    assert tiers.may_hold("tests/a", Tier.FAST)
    assert tiers.may_hold("tests/a/b/c.py", Tier.FAST)
    assert not tiers.may_hold("tests/a/d.py", Tier.TEST)
    assert not tiers.may_hold("tests/z", Tier.FAST)


def test_a_name_covers_whole_parts_only() -> None:
    assert is_below("tests/a/b.py::test_c[1]", "tests/a/b.py::test_c")
    assert not is_below("tests/a/b.py::test_cd", "tests/a/b.py::test_c")
    assert not is_below("tests/ab/c.py", "tests/a")


@pytest.mark.parametrize("marker", ["chromium", "nginx", "prometheus", "redis", "triton"])
def test_a_service_is_met_before_soak(marker: str) -> None:
    """By a file that is not in soak as a whole."""
    tiers = Tiers.load()
    using = [
        path
        for path in Path(ROOT / "tests").rglob("test_*.py")
        if re.search(rf"mark\.{marker}\b", path.read_text("utf-8"))
    ]
    assert [path for path in using if tiers.of_id(str(path.relative_to(ROOT))) < Tier.SOAK]


def test_every_file_that_the_order_names_exists_and_is_named_once() -> None:
    assert [path for path in LONGEST if not (ROOT / path).is_file()] == []
    assert len(set(LONGEST)) == len(LONGEST)


def test_the_longest_files_come_first_and_tests_of_a_file_stay_together() -> None:
    others = ["tests/a.py::test_a", "tests/b.py::test_b", "tests/b.py::test_a"]
    last, first = f"{LONGEST[1]}::test_b[x]", f"{LONGEST[0]}::test_c"
    items = [SimpleNamespace(nodeid=nodeid) for nodeid in (others[0], last, others[1], first, others[2])]
    assert [item.nodeid for item in longest_first(items)] == [first, last, *others]
