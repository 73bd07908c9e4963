"""Prometheus's configuration and rules, by promtool; every rule has unit tests of its own."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest
import yaml

from tests.support.prometheus_server import CONFIG

FOLDER = CONFIG.parent
RULE_FILES = sorted((FOLDER / "rules").glob("*.yml"))
TEST_FILES = sorted((FOLDER / "tests").glob("*.yml"))


def promtool(*args: object) -> None:
    done = subprocess.run(["promtool", *map(str, args)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def rules() -> list[dict[str, Any]]:
    groups = [group for path in RULE_FILES for group in yaml.safe_load(path.read_text())["groups"]]
    return [rule for group in groups for rule in group["rules"]]


def entries_of(kind: str) -> list[dict[str, Any]]:
    """Entries of `alert_rule_test` or `promql_expr_test` in all files."""
    files = [yaml.safe_load(path.read_text())["tests"] for path in TEST_FILES]
    return [entry for tests in files for test in tests for entry in test.get(kind, ())]


@pytest.mark.prometheus
def test_the_configuration_and_its_rules_are_valid() -> None:
    promtool("check", "config", CONFIG)
    promtool("check", "rules", "--lint=all", "--lint-fatal", *RULE_FILES)


@pytest.mark.prometheus
@pytest.mark.parametrize("path", TEST_FILES, ids=lambda path: path.stem)
def test_X20_rules_do_what_they_say(path: Any) -> None:
    promtool("test", "rules", path)


def test_every_alert_is_tested_when_it_fires_and_when_it_does_not() -> None:
    names = {rule["alert"] for rule in rules() if "alert" in rule}
    entries = entries_of("alert_rule_test")
    assert {entry["alertname"] for entry in entries if entry["exp_alerts"]} == names
    assert {entry["alertname"] for entry in entries if not entry["exp_alerts"]} == names


def test_every_recording_rule_is_tested() -> None:
    tested = " ".join(entry["expr"] for entry in entries_of("promql_expr_test"))
    assert [rule["record"] for rule in rules() if "record" in rule and rule["record"] not in tested] == []


def test_alerts_say_what_is_wrong_and_how_soon_it_matters() -> None:
    for rule in rules():
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("page", "ticket"), rule["alert"]
            assert set(rule["annotations"]) == {"summary", "description"}, rule["alert"]
            # of series that are not there, no label says whose they were
            assert "$labels.instance" in rule["annotations"]["summary"] or "absent(" in rule["expr"], rule["alert"]


def test_every_alert_has_a_row_that_says_where_to_look_and_what_to_do() -> None:
    text = (CONFIG.parents[2] / "docs" / "operations.md").read_text("utf-8")
    alerts = [(rule["alert"], rule["labels"]["severity"]) for rule in rules() if "alert" in rule]
    rows = re.findall(r"^\| (`Nsm.*`) \| (\w+) \| .* \| .* \|$", text, re.MULTILINE)
    assert [(alert, severity) for names, severity in rows for alert in re.findall(r"\w+", names)] == alerts
