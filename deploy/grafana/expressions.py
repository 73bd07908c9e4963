"""The expressions of a dashboard as Grafana sends them to Prometheus: its variables filled in."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

DASHBOARDS = Path(__file__).resolve().parent / "dashboards"


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """One expression of one panel. `legend` may hold {{label}}."""

    board: str
    panel: str
    expr: str
    legend: str

    def __str__(self) -> str:
        return f"{self.board}: {self.panel}: {self.legend}"

    def name(self, labels: Mapping[str, str]) -> str:
        """The legend of one series."""
        return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), self.legend)


def boards() -> list[dict[str, Any]]:
    """What Grafana reads, in the order of the files' names."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(DASHBOARDS.glob("*.json"))]


def panels(board: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Without the rows' titles."""
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def targets(board: Mapping[str, Any], panel: Mapping[str, Any], *, window: str, span: str) -> Iterator[Target]:
    """Variables as they are when a dashboard is opened. `window`: for `$__rate_interval`; `span`: for `$__range`."""
    values = {"__rate_interval": window, "__range": span}
    values |= {variable["name"]: _value(variable) for variable in board["templating"]["list"]}
    for target in panel["targets"]:
        # what is no variable stays: $1 is a group of label_replace
        expr = re.sub(r"\$(\w+)", lambda found: values.get(found[1], found[0]), target["expr"])
        yield Target(board["uid"], panel["title"], expr, target["legendFormat"])


def _value(variable: Mapping[str, Any]) -> str:
    current = variable.get("current", {}).get("value", "")
    return str(variable["allValue"] if current == "$__all" else current)
