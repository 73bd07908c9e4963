"""Command line of a comparison by history: `python -m nsm_lab.evaluation.history a.json b.json`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from nsm_core.errors import ConfigError, NsmError
from nsm_lab.evaluation.history.comparison import comparison_lines
from nsm_lab.evaluation.history.curves import history_curves
from nsm_lab.evaluation.history.measure import HistoryResult
from nsm_lab.evaluation.history.stored import read_history
from nsm_lab.evaluation.history.together import gains_together
from nsm_lab.evaluation.markdown import table


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m nsm_lab.evaluation.history",
        description="What the states of several models hold, or of one on several sets of documents, from reports with "
        "--suite history.",
    )
    parser.add_argument("reports", type=Path, nargs="+", metavar="REPORT.json")
    parser.add_argument("--labels", nargs="+", help="names of the models (default: the files')")
    parser.add_argument("--together", action="store_true", help="one model: add the gains in text over all documents")
    parser.add_argument("--output", type=Path, help="write OUTPUT.md and the curves OUTPUT.svg as well")
    return parser


def _together(results: Iterable[HistoryResult]) -> str:
    gains = gains_together([result.fresh_starts for result in results if result.fresh_starts])
    rows = []
    for start, gain in gains.items():
        half = "–" if gain.high is None else f"{gain.high - gain.mean:.4f}"
        rows.append([f"{start:,}", str(len(gain.per_document)), f"{gain.mean:+.4f}", half])
    return table(("fresh start before the span (tokens)", "documents", "gain (nats/token)", "±"), rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables; exit status 0, or 1 after one line on stderr."""
    options = build_parser().parse_args(argv)
    try:
        labels = options.labels or [path.stem for path in options.reports]
        if len(labels) != len(options.reports) or len(set(labels)) != len(labels):
            raise ConfigError(f"each of {len(options.reports)} reports needs a name of its own, got {labels}")
        results = {label: read_history(path) for label, path in zip(labels, options.reports, strict=True)}
        markdown = comparison_lines(results) + "\n"
        if options.together:
            markdown += f"\n## All documents together\n\n{_together(results.values())}\n"
        if options.output is not None:
            options.output.parent.mkdir(parents=True, exist_ok=True)
            Path(f"{options.output}.md").write_text(markdown, "utf-8")
            Path(f"{options.output}.svg").write_text(history_curves(results), "utf-8")
    except NsmError as error:
        print(f"history: {error}", file=sys.stderr)
        return 1
    print(markdown, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
