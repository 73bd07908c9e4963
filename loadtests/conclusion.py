"""From samples to an exit code: `python -m loadtests.conclusion DIR --slo short`, for samples of a run made by hand."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtests.report import text_table, write_report
from loadtests.resources import ResourceUse
from loadtests.samples import read_samples
from loadtests.slo import Slo, judge, load_slo

SAMPLES = "samples.jsonl"
EXIT_MISSED = 1


def conclude(directory: Path, slo: Slo, use: Sequence[ResourceUse] = (), facts: Mapping[str, Any] | None = None) -> int:
    """Judges the samples in `directory`, writes the report there, prints both; 0 when every objective is met."""
    samples = read_samples(directory / SAMPLES)
    verdicts = judge(slo, samples, use)
    report = write_report(directory, samples, verdicts, use, facts)
    sys.stdout.write(text_table(samples) + "\n")
    for verdict in verdicts:
        sys.stdout.write(f"{verdict}\n")
    sys.stdout.write(f"report: {report}\n")
    return 0 if all(verdict.is_met for verdict in verdicts) else EXIT_MISSED


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtests.conclusion", description=__doc__)
    parser.add_argument("directory", type=Path, help=f"where {SAMPLES} is")
    parser.add_argument("--slo", required=True, help="a file, or a name in loadtests/objectives")
    args = parser.parse_args()
    return conclude(args.directory, load_slo(args.slo))


if __name__ == "__main__":
    sys.exit(main())
