"""The dashboards as Grafana reads them: their panels' expressions, with variables filled in."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

from tests.prometheus_server import DEPLOY

FOLDER = DEPLOY / "grafana" / "dashboards"
BUILT_IN = {"__rate_interval": "1m", "__range": "1m"}  # of Grafana: longer than the test's service runs


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """One expression of one panel."""

    board: str
    panel: str
    expr: str
    legend: str

    def __str__(self) -> str:
        return f"{self.board}: {self.panel}: {self.legend}"


def boards() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))]


def targets(board: dict[str, Any]) -> Iterator[Target]:
    """What Grafana sends to Prometheus when every variable has its first value."""
    values = {**BUILT_IN, **{item["name"]: _value(item) for item in board["templating"]["list"]}}
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            expr = re.sub(r"\$(\w+)", lambda found: values[found[1]], target["expr"])
            yield Target(board["uid"], panel["title"], expr, target["legendFormat"])


def _value(variable: dict[str, Any]) -> str:
    current = variable.get("current", {}).get("value", "")
    return str(variable["allValue"] if current == "$__all" else current)
