"""From samples to an exit code: `python -m loadtests.conclusion DIR --slo short`, for samples of a run made by hand."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtests.errors import EXIT_MISSED, EXIT_NO_RESULT, RunError
from loadtests.report import text_table, write_report
from loadtests.resources import ResourceUse
from loadtests.run_end import RUN_END, find_gaps
from loadtests.samples import read_samples
from loadtests.slo import Slo, Verdict, judge, load_slo

SAMPLES = "samples.jsonl"


def conclude(
    directory: Path,
    slo: Slo,
    use: Sequence[ResourceUse] = (),
    facts: Mapping[str, Any] | None = None,
    *,
    more: Sequence[Verdict] = (),
    interruption: str = "",
) -> int:
    """Judges the samples in `directory`, writes the report there, prints both, and returns the exit code.

    0 when every objective is met, 1 when one is missed, 2 when a part of the planned load did not run. `more`: verdicts
    that do not come from samples. `interruption`: what ended the run early, if something did.
    """
    samples = read_samples(directory / SAMPLES)
    gaps = [interruption] if interruption else find_gaps(directory, samples)
    verdicts = [*judge(slo, samples, use), *more]
    report = write_report(directory, samples, verdicts, use, facts, gaps=gaps)
    sys.stdout.write(text_table(samples) + "\n")
    for verdict in verdicts:
        sys.stdout.write(f"{verdict}\n")
    sys.stdout.write(f"report: {report}\n")
    for gap in gaps:
        sys.stderr.write(f"no result: {gap}\n")
    if gaps:
        return EXIT_NO_RESULT
    return 0 if all(verdict.is_met for verdict in verdicts) else EXIT_MISSED


def prepare_directory(out: Path) -> None:
    """Makes it, and removes an earlier run's files that would pass for this one's. Raises RunError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in (SAMPLES, RUN_END, "report.html", "summary.json"):
            (out / name).unlink(missing_ok=True)
    except OSError as error:
        raise RunError(f"--out {out}: {error.strerror}") from error


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtests.conclusion", description=__doc__)
    parser.add_argument("directory", type=Path, help=f"where {SAMPLES} is")
    parser.add_argument("--slo", required=True, help="a file, or a name in loadtests/objectives")
    args = parser.parse_args(arguments)
    try:
        return conclude(args.directory, load_slo(args.slo))
    except RunError as error:
        sys.stderr.write(f"no result: {error}\n")
        return EXIT_NO_RESULT


if __name__ == "__main__":
    sys.exit(main())
