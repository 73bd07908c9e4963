"""Command line of a comparison: `python -m nsm_lab.evaluation.compare a.json b.json`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from nsm_core.errors import ConfigError, NsmError
from nsm_lab.evaluation.compare.tables import RATES, load, to_markdown, to_svg


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m nsm_lab.evaluation.compare", description="Evaluations side by side, from what --output wrote."
    )
    parser.add_argument("reports", type=Path, nargs="+", metavar="REPORT.json")
    parser.add_argument("--labels", nargs="+", help="names of the models (default: the files')")
    parser.add_argument("--rate", choices=sorted(RATES), default="bits_per_byte", help="default %(default)s")
    parser.add_argument("--output", type=Path, help="write OUTPUT.md and the plot OUTPUT.svg as well")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables; exit status 0, or 1 after one line on stderr."""
    options = build_parser().parse_args(argv)
    try:
        labels = options.labels or [None] * len(options.reports)
        if len(labels) != len(options.reports):
            raise ConfigError(f"--labels needs one name for each of {len(options.reports)} reports, got {len(labels)}")
        entries = [load(path, label) for path, label in zip(options.reports, labels, strict=True)]
        markdown = to_markdown(entries, options.rate)
        if options.output is not None:
            options.output.parent.mkdir(parents=True, exist_ok=True)
            Path(f"{options.output}.md").write_text(markdown, "utf-8")
            Path(f"{options.output}.svg").write_text(to_svg(entries, options.rate), "utf-8")
    except NsmError as error:
        print(f"compare: {error}", file=sys.stderr)
        return 1
    print(markdown, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
