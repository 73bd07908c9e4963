"""A run as one HTML page that holds its own pictures, and as PNG files beside it."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtests.charts import draw_all
from loadtests.resources import ResourceUse
from loadtests.samples import OUTCOMES, Sample, by_group, summary
from loadtests.slo import Verdict

STYLE = """
body { font: 15px/1.4 system-ui, sans-serif; margin: 2em auto; max-width: 1100px; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 1em 0 } th, td { padding: .25em .7em; text-align: right }
th, td { border-bottom: 1px solid #ddd }
th:first-child, td:first-child { text-align: left } img { max-width: 100% } .missed { color: #b00; font-weight: bold }
.met { color: #070 }
"""
MAX_PROBLEMS = 20
LATENCIES = ("ttft_ms", "itl_ms", "e2e_ms")


def write_report(
    directory: Path,
    samples: Sequence[Sample],
    verdicts: Sequence[Verdict],
    use: Sequence[ResourceUse] = (),
    facts: Mapping[str, Any] | None = None,
    *,
    gaps: Sequence[str] = (),
) -> Path:
    """`report.html`, its pictures and `summary.json` in `directory`. `facts`: about the run, for its head. `gaps`:
    parts of the planned load that did not run; with any, the page claims no result.
    """
    pictures = draw_all(samples, use, directory) if samples else []
    figures = {name_of(*key): summary(group) for key, group in by_group(samples).items()}
    path = directory / "report.html"
    facts = {**(facts or {}), **({"not run": "; ".join(gaps)} if gaps else {})}
    parts = [
        f"<!doctype html><meta charset=utf-8><title>Load test</title><style>{STYLE}</style>",
        f"<h1>Load test: {_headline(verdicts, gaps)}</h1>",
        _table(("fact", "value"), ((name, str(value)) for name, value in facts.items())),
        _verdicts(verdicts),
        _figures(figures),
        *(f'<h2>{picture.stem}</h2><img alt="{picture.stem}" src="{_inline(picture)}">' for picture in pictures),
        _problems(samples),
    ]
    path.write_text("\n".join(parts), "utf-8")
    outcome = {"facts": facts, "figures": figures, "verdicts": [str(verdict) for verdict in verdicts]}
    (directory / "summary.json").write_text(json.dumps(outcome, indent=1, default=str), "utf-8")
    return path


def _headline(verdicts: Sequence[Verdict], gaps: Sequence[str]) -> str:
    if gaps:
        return "no result, a part of it did not run"
    return "every objective met" if all(verdict.is_met for verdict in verdicts) else "objectives missed"


def name_of(scenario: str, step: str) -> str:
    return f"{scenario} {step}".strip()


def text_table(samples: Sequence[Sample]) -> str:
    """For a terminal: one line for each scenario and step."""
    names = ("requests", *OUTCOMES)
    lines = [
        f"{'':<28}" + "".join(f"{name:>11}" for name in names) + f"{'TTFT p50':>10}{'p99':>8}{'E2E p50':>9}{'p99':>8}"
    ]
    for key, group in by_group(samples).items():
        row = summary(group)
        times = (row["ttft_ms"]["p50"], row["ttft_ms"]["p99"], row["e2e_ms"]["p50"], row["e2e_ms"]["p99"])
        shown = "".join(f"{_number(value):>{width}}" for value, width in zip(times, (10, 8, 9, 8), strict=True))
        lines.append(f"{name_of(*key):<28}" + "".join(f"{row[name]:>11}" for name in names) + shown)
    return "\n".join(lines)


def _figures(figures: Mapping[str, Mapping[str, Any]]) -> str:
    counts = ("requests", *OUTCOMES)
    rates = ("requests_per_s", "output_tokens_per_s", "computed_tokens", "resumed_tokens")
    head = ("scenario", *counts, *(name.replace("_", " ") for name in rates))
    rows = (
        (name, *(row[key] for key in counts), *(_number(row[key]) for key in rates)) for name, row in figures.items()
    )
    times_head = ("ms", *(f"{measure.removesuffix('_ms').upper()} p{n}" for measure in LATENCIES for n in (50, 90, 99)))
    times = (
        (
            name,
            *(_number(row[measure][f"p{n}"]) for measure in LATENCIES for n in (50, 90, 99)),
        )
        for name, row in figures.items()
    )
    speeds = (
        (name, *(_number(row["tokens_per_s"][f"p{n}"]) for n in (50, 90, 99)), _number(row["lag_ms"]["p99"]))
        for name, row in figures.items()
    )
    speeds_head = ("tokens/s of an answer", "p50", "p90", "p99", "client's lag p99, ms")
    return "<h2>Figures</h2>" + _table(head, rows) + _table(times_head, times) + _table(speeds_head, speeds)


def _verdicts(verdicts: Sequence[Verdict]) -> str:
    if not verdicts:
        return ""
    rows = "".join(
        f"<tr><td>{html.escape(verdict.where)}: {html.escape(verdict.what)}</td><td>{_number(verdict.measured)}</td>"
        f"<td>{verdict.limit:g}</td><td class={'met>met' if verdict.is_met else 'missed>missed'}</td></tr>"
        for verdict in verdicts
    )
    return f"<h2>Objectives</h2><table><tr><th>objective<th>measured<th>limit<th></tr>{rows}</table>"


def _problems(samples: Sequence[Sample]) -> str:
    bad = [sample for sample in samples if sample.outcome in ("wrong", "failed", "unfinished")]
    if not bad:
        return ""
    rows = ((name_of(sample.scenario, sample.step), sample.outcome, sample.problem) for sample in bad[:MAX_PROBLEMS])
    return f"<h2>What went wrong ({len(bad)})</h2>" + _table(("scenario", "outcome", "problem"), rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    top = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"


def _inline(picture: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(picture.read_bytes()).decode()


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
