"""Results of many small runs in one file of JSON lines: one line a run, written when it ends, so that a grid that was
stopped goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class RunsFile:
    """Lines of `path`, each with the settings of a run under `run` and what came of it.

    A last line that was cut off is dropped. Raises ValueError for a file with any other line that is not JSON.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.results: list[dict[str, Any]] = []
        if path.exists():
            self._read()

    def _read(self) -> None:
        whole, _, cut = self.path.read_text("utf-8").rpartition("\n")
        self.results = [json.loads(line) for line in whole.splitlines()]
        if cut:
            self.path.write_text("".join(f"{_line(result)}\n" for result in self.results), "utf-8")

    def find(self, run: Mapping[str, Any]) -> dict[str, Any] | None:
        """The result of the run with exactly these settings; None if it has not ended."""
        wanted = json.loads(json.dumps(run))
        return next((result for result in self.results if result["run"] == wanted), None)

    def add(self, run: Mapping[str, Any], outcome: Mapping[str, Any]) -> dict[str, Any]:
        """Appends a result and returns it as it will be read."""
        line = _line({"run": run, **outcome})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
        result: dict[str, Any] = json.loads(line)
        self.results.append(result)
        return result


def _line(result: Mapping[str, Any]) -> str:
    return json.dumps(result, ensure_ascii=False, allow_nan=False)
