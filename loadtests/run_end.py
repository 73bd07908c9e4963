"""Whether a run was whole: it lasted as long as planned, and each planned arrival left a sample."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from loadtests.samples import Sample

RUN_END = "run.json"
TOLERANCE_S = 1.0  # by which a timer may be early


@dataclasses.dataclass(frozen=True, slots=True)
class RunEnd:
    """Written when a run ends. `arrivals`: how many were planned for each step of an open loop."""

    planned_s: float
    ran_s: float
    arrivals: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def write(self, directory: Path) -> None:
        (directory / RUN_END).write_text(json.dumps(dataclasses.asdict(self)), "utf-8")

    def gaps(self, samples: Sequence[Sample]) -> list[str]:
        """One sentence for each part of the plan that did not run; empty for a whole run."""
        gaps = []
        if self.ran_s < self.planned_s - TOLERANCE_S:
            gaps.append(f"the load stopped after {self.ran_s:.0f} of {self.planned_s:.0f} s")
        recorded = collections.Counter(sample.step for sample in samples)
        for step, planned in self.arrivals.items():
            if recorded[step] < planned:
                gaps.append(f"step {step}: {recorded[step]} of {planned} arrivals were recorded")
        return gaps


def find_gaps(directory: Path, samples: Sequence[Sample]) -> list[str]:
    """The gaps of the run whose files are in `directory`."""
    path = directory / RUN_END
    if not path.exists():
        return [f"{path} is missing: the run did not come to its end"]
    return RunEnd(**json.loads(path.read_text("utf-8"))).gaps(samples)
