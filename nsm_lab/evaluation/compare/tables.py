"""Several evaluations side by side, as Markdown and as a plot."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nsm_core.errors import ConfigError, reason_of
from nsm_lab.charts import Line, line_chart
from nsm_lab.evaluation.markdown import position_range, rate, short, table
from nsm_lab.evaluation.model_facts import megabytes

RATES = {"bits_per_byte": ("bits/byte", 4), "nats_per_token": ("nats/token", 4), "word_perplexity": ("word ppl", 1)}


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One evaluation as `nsm eval --output` wrote it."""

    label: str
    fields: dict[str, Any]

    def buckets(self, name: str) -> dict[tuple[int, int | None], dict[str, Any]]:
        """By position: `name` is `buckets` or `summary`."""
        return {(bucket["start"], bucket["stop"]): bucket for bucket in self.fields["losses"][name]}


def load(path: Path, label: str | None = None) -> Entry:
    """An evaluation with losses, called `label`, or as its file. Raises ConfigError."""
    try:
        fields = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {reason_of(error)}") from error
    parts = ("provenance", "model", "losses")
    if not isinstance(fields, dict) or not all(isinstance(fields.get(part), dict) for part in parts):
        raise ConfigError(f"{path} is not the report of an evaluation with losses: it lacks one of {', '.join(parts)}")
    return Entry(path.stem if label is None else label, fields)


def to_markdown(entries: Sequence[Entry], rate_name: str = "bits_per_byte") -> str:
    """Sizes and losses by position; warns where the evaluations did not read the same text."""
    tables = (_sizes(entries), _losses(entries, rate_name))
    difference = _difference(entries)
    return "\n\n".join([*([f"**Not comparable**: {difference}."] if difference else []), *tables]) + "\n"


def _difference(entries: Sequence[Entry]) -> str | None:
    """Bits per byte compare between tokenizers, but only on the same bytes."""
    texts = {(entry.fields["settings"].get("split"), entry.fields["losses"]["num_documents"]) for entry in entries}
    if len(texts) > 1:
        return "the evaluations read different documents"
    cuts = {entry.fields["settings"].get("max_tokens_per_document") for entry in entries}
    num_bytes = {entry.fields["losses"]["total"]["num_bytes"] for entry in entries}
    return (
        "the evaluations read different lengths" if len(cuts) > 1 or (cuts == {None} and len(num_bytes) > 1) else None
    )


def _sizes(entries: Sequence[Entry]) -> str:
    positions = [tokens for tokens, _ in entries[0].fields["model"]["state_bytes"]]
    rows = []
    for entry in entries:
        config, state_bytes = entry.fields["model"]["config"], dict(entry.fields["model"]["state_bytes"])
        layers = f"{config.get('layer_pattern', 'RWKV-7')} x {config['num_layers']}"
        sizes = (megabytes(state_bytes[tokens]) if tokens in state_bytes else "–" for tokens in positions)
        rows.append([entry.label, layers, f"{entry.fields['provenance']['num_parameters']:,}", *sizes])
    return table(("model", "layers", "parameters", *(f"state at {short(tokens)}" for tokens in positions)), rows)


def _losses(entries: Sequence[Entry], rate_name: str) -> str:
    title, digits = RATES[rate_name]
    # Texts of less than 1K tokens, or buckets of one's own, have no summary to speak of
    name = "summary" if all(len(entry.fields["losses"]["summary"]) > 1 for entry in entries) else "buckets"
    ranges = sorted({bounds for entry in entries for bounds in entry.buckets(name)}, key=lambda bounds: bounds[0])
    rows = []
    for entry in entries:
        buckets = entry.buckets(name)
        values = (buckets.get(bounds, {}).get(rate_name) for bounds in ranges)
        rows.append(
            [entry.label, *(rate(value, digits) for value in (*values, entry.fields["losses"]["total"][rate_name]))]
        )
    return table((title, *(position_range(*bounds) for bounds in ranges), "all"), rows)


def to_svg(entries: Sequence[Entry], rate_name: str = "bits_per_byte") -> str:
    """Loss by position, each bucket at its geometric middle."""
    lines = []
    for entry in entries:
        points = [(_middle(*bounds), bucket[rate_name]) for bounds, bucket in entry.buckets("buckets").items()]
        lines.append(Line(entry.label, tuple((x, y) for x, y in points if y is not None)))
    last = max((bounds[1] or 2 * bounds[0] for entry in entries for bounds in entry.buckets("buckets")), default=128)
    ticks = [(float(tokens), short(tokens)) for tokens in (2**power for power in range(6, 32)) if tokens <= last]
    return line_chart(lines, x_ticks=ticks, x_label="position (tokens)", y_label=RATES[rate_name][0])


def _middle(start: int, stop: int | None) -> float:
    return math.sqrt(max(start, 32) * (2 * start if stop is None else stop))
