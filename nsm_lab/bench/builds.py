"""Measures two builds on one machine in turns. Each run is its own process."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from nsm_core.errors import ConfigError, NsmError
from nsm_lab.bench.result import Measure, collect, read_result

RUN = "from service.cli.main import main; main()"
RUN_S = 1800.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """A checkout and its Python: that of its own environment, or the current one."""

    name: str
    root: Path
    python: Path

    @classmethod
    def at(cls, name: str, root: Path) -> Build:
        """Raises ConfigError for a directory without `nsm bench`."""
        root = root.expanduser().absolute()
        if not (root / "service" / "cli" / "bench.py").is_file():
            raise ConfigError(f"{root} is no checkout that can measure itself: it has no service/cli/bench.py")
        own = root / ".venv" / "bin" / "python"
        return cls(name=name, root=root, python=own if own.exists() else Path(sys.executable))

    def measure(self, arguments: Sequence[str]) -> dict[str, float]:
        """One run of `nsm bench engine`: the median of each measure. Raises NsmError."""
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory) / "result.json"
            command = [str(self.python), "-c", RUN, "bench", "engine", *arguments, "--output", str(file)]
            environ = {**os.environ, "PYTHONPATH": str(self.root)}
            try:
                done = subprocess.run(
                    command, cwd=directory, env=environ, capture_output=True, text=True, check=False, timeout=RUN_S
                )
            except subprocess.TimeoutExpired as error:
                raise NsmError(f"the {self.name} build took longer than {RUN_S:g} s") from error
            if done.returncode:
                reason = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
                raise NsmError(f"the {self.name} build failed with status {done.returncode}: {reason[0]}")
            return {measure.name: measure.median for measure in read_result(file).measures}


def this_build() -> Build:
    """The build that this process runs."""
    return Build(name="new", root=Path(__file__).parents[2], python=Path(sys.executable))


def in_turns(
    base: Build, new: Build, arguments: Sequence[str], *, rounds: int, on_progress: Callable[[int], None]
) -> tuple[tuple[Measure, ...], tuple[Measure, ...]]:
    """Measures of both builds, one value for each round. The first build changes each round, against drift.

    `on_progress` gets the number of rounds done.
    """
    results: dict[str, list[dict[str, float]]] = {base.name: [], new.name: []}
    for number in range(rounds):
        for build in (base, new) if number % 2 == 0 else (new, base):
            results[build.name].append(build.measure(arguments))
        on_progress(number + 1)
    return collect(results[base.name]), collect(results[new.name])
