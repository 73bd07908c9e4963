"""The cells as tables, one JSON file and pictures."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.family.fit import fit_exponent
from nsm_lab.charts import Line, line_chart
from nsm_lab.evaluation.markdown import table

Row = dict[str, Any]
Cells = dict[str, dict[str, Row]]

FEW_STATES = 4096  # tokens from which a second exponent is fitted: below, calls take as long as their launches
CHARTS = {
    "slots": ("pulse", "direct", "hybrid-projector", "allocation", "communicating", "two-level"),
    "ours": ("simple", "gru", "communicating", "hybrid", "advanced-hybrid", "sequential-hybrid", "memory-augmented"),
    "attention": ("pulse", "hybrid", "sliding-window", "transformer", "linformer", "performer"),
    "recurrent": ("pulse", "linear-recurrence", "lstm", "rwkv7", "mamba2", "s4d", "s5"),
}


def write_report(output: Path, head: Row, cells: Cells) -> None:
    """table.md, table.json and the pictures, in `output`."""
    parts = [_title(head), _sizes(cells), _steps(cells), _quality(cells)]
    for kind, title in (("train", "Training, one row"), ("prefill", "Prefill, one row")):
        parts.append(_by_length(cells, kind, title))
        for name, models in CHARTS.items():
            picture = _chart(cells, kind, models)
            if picture:
                (output / f"{kind}-{name}.svg").write_text(picture, "utf-8")
    parts += [_decoding(cells), _reasons(cells)]
    (output / "table.md").write_text("\n\n".join(part for part in parts if part) + "\n", "utf-8")
    whole = {
        "header": head,
        "models": cells,
        "exponents": {kind: _exponents(cells, kind) for kind in ("train", "prefill")},
    }
    (output / "table.json").write_text(json.dumps(whole, indent=1) + "\n", "utf-8")


def _title(head: Row) -> str:
    note = f" {head['note']}" if head["note"] else ""
    return (
        f"# The family beside its baselines\n\n{head['device']}, torch {head['torch']}, {head['precision']}; commit "
        f"{head['commit']}, {head['created']}.{note}\n\n    {head['command']}"
    )


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return table(list(header), [list(row) for row in rows])


def _label(cells: Cells, model: str) -> str:
    return str(cells[model].get("size", {}).get("label", model))


def _sizes(cells: Cells) -> str:
    header = ("model", "layers", "parameters", "MFLOP a token, forward", "forward and backward", "decoding",
              "other operations a token (M), forward")  # fmt: skip
    rows = []
    for model, row in _measured(cells, "size"):
        tokens = row["tokens"]
        counts = [row[name] / tokens / 1e6 for name in ("forward_flops", "training_flops")]
        counts += [row["decode_flops"] / 1e6, row["forward_other"] / tokens / 1e6]
        shown = [f"{count:.2f}" for count in counts]
        rows.append((_label(cells, model), f"`{row['layer_pattern']}`", f"{row['parameters']:,}", *shown))
    return "## Sizes and operations\n\n" + _table(header, rows)


def _steps(cells: Cells) -> str:
    header = (
        "model",
        "forward, ms",
        "backward, ms",
        "tokens/s",
        "memory, MiB",
        "gradient norm, first step",
        "last tenth",
    )
    rows = []
    for model, row in _measured(cells, "step"):
        trained = _best(cells[model])
        norms = [f"{trained[name]:.3f}" if trained else "" for name in ("first_gradient_norm", "gradient_norm")]
        memory = f"{row['peak_bytes'] / 2**20:,.0f}"
        rows.append(
            (
                _label(cells, model),
                _spread(row["forward"]),
                _spread(row["backward"]),
                f"{row['tok_per_s']:,.0f}",
                memory,
                *norms,
            )
        )
    return "## A training step\n\nMedian and, in brackets, quartiles. Memory on top of weights.\n\n" + _table(
        header, rows
    )


def _spread(row: Row) -> str:
    return f"{row['ms']:.2f} ({row['ms_q1']:.2f}-{row['ms_q3']:.2f})"


def _quality(cells: Cells) -> str:
    lrs = sorted({cell for found in cells.values() for cell in found if cell.startswith("quality-")})
    header = (
        "model",
        *(f"at lr {lr.removeprefix('quality-')}" for lr in lrs),
        "best",
        "beyond the training length",
        "training, s",
    )
    rows = []
    for model, found in cells.items():
        best = _best(found)
        each = [f"{found[lr]['bits_per_byte']:.3f}" if "bits_per_byte" in found.get(lr, {}) else "-" for lr in lrs]
        if best:
            rows.append(
                (
                    _label(cells, model),
                    *each,
                    f"{best['bits_per_byte']:.3f}",
                    f"{best['long_bits_per_byte']:.3f}",
                    f"{best['train_s']:.0f}",
                )
            )
    tokens = {best["tokens"] for found in cells.values() if (best := _best(found))}
    said = (
        f"After {', '.join(f'{count:,}' for count in sorted(tokens))} bytes of training each, one seed."
        if tokens
        else ""
    )
    return f"## Bits per byte, Tiny Shakespeare\n\n{said}\n\n" + _table(header, rows)


def _best(found: dict[str, Row]) -> Row | None:
    trained = [row for cell, row in found.items() if cell.startswith("quality-") and "bits_per_byte" in row]
    return min(trained, key=lambda row: float(row["bits_per_byte"])) if trained else None


def _measured(cells: Cells, cell: str) -> list[tuple[str, Row]]:
    return [(model, found[cell]) for model, found in cells.items() if cell in found and "reason" not in found[cell]]


def _lengths(cells: Cells, kind: str) -> list[int]:
    prefix = f"{kind}-"
    return sorted(
        {int(cell.removeprefix(prefix)) for found in cells.values() for cell in found if cell.startswith(prefix)}
    )


def _points(found: dict[str, Row], kind: str) -> list[tuple[int, float]]:
    """(tokens, milliseconds), ascending."""
    prefix = f"{kind}-"
    rows = [(int(cell.removeprefix(prefix)), row) for cell, row in found.items() if cell.startswith(prefix)]
    return sorted((length, row.get("ms") or row["both"]["ms"]) for length, row in rows if "reason" not in row)


def _exponents(cells: Cells, kind: str) -> dict[str, Row]:
    fitted: dict[str, Row] = {}
    for model, found in cells.items():
        points = _points(found, kind)
        fits = {"all": fit_exponent(*_columns(points)), "long": fit_exponent(*_columns(points, FEW_STATES))}
        fitted[model] = {
            name: {"value": fit.value, "half_width": fit.half_width, "points": fit.points, "shown": str(fit)}
            for name, fit in fits.items()
            if fit is not None
        }
    return fitted


def _columns(points: Sequence[tuple[int, float]], at_least: int = 0) -> tuple[list[float], list[float]]:
    points_shown = [(length, ms) for length, ms in points if length >= at_least]
    return [length for length, _ in points_shown], [ms for _, ms in points_shown]


def _by_length(cells: Cells, kind: str, title: str) -> str:
    lengths, fitted = _lengths(cells, kind), _exponents(cells, kind)
    header = (
        "model",
        *(f"{length:,}" for length in lengths),
        "exponent",
        f"from {FEW_STATES:,}",
        "memory at the longest, MiB",
    )
    rows = []
    for model, found in cells.items():
        each = [_rate(found.get(f"{kind}-{length}")) for length in lengths]
        fits = [fitted[model].get(name, {}).get("shown", "-") for name in ("all", "long")]
        peaks = [row["peak_bytes"] for length in lengths if "peak_bytes" in (row := found.get(f"{kind}-{length}", {}))]
        rows.append((_label(cells, model), *each, *fits, f"{peaks[-1] / 2**20:,.0f}" if peaks else "-"))
    return f"## {title}: tokens/s by length\n\nExponent of time against length, with its 95 % interval.\n\n" + _table(
        header, rows
    )


def _rate(row: Row | None) -> str:
    return f"{row['tok_per_s']:,.0f}" if row and "tok_per_s" in row else "-"


def _decoding(cells: Cells) -> str:
    rows_of = [str(rows) for rows in _lengths(cells, "decode")]
    states = sorted(
        {length for found in cells.values() for length in found.get("size", {}).get("state_bytes", {})}, key=int
    )
    ends = [states[0], states[-1]] if states else []
    header = (
        "model",
        *(f"ms, {rows} rows" for rows in rows_of),
        *(f"state at {int(end):,} tokens, KiB" for end in ends),
    )
    rows = []
    for model, found in cells.items():
        each = [_spread(row) if "ms" in (row := found.get(f"decode-{count}", {})) else "-" for count in rows_of]
        sizes = found.get("size", {}).get("state_bytes", {})
        rows.append(
            (_label(cells, model), *each, *(f"{sizes[end] / 1024:,.0f}" if end in sizes else "-" for end in ends))
        )
    return "## Decoding, one token\n\n" + _table(header, rows)


def _reasons(cells: Cells) -> str:
    lines = [
        f"- {_label(cells, model)}, {cell}: {row['reason']}"
        for model, found in cells.items()
        for cell, row in found.items()
        if "reason" in row
    ]
    return "## Not measured\n\n" + "\n".join(lines) if lines else ""


def _chart(cells: Cells, kind: str, models: Sequence[str]) -> str | None:
    """Microseconds a token by length: flat where time grows with the length alone."""
    lines = []
    for model in (name for name in models if name in cells):
        points = tuple((float(length), 1e3 * ms / length) for length, ms in _points(cells[model], kind))
        if points:
            lines.append(Line(_label(cells, model), points))
    if not lines:
        return None
    ticks = [(float(length), f"{length:,}") for length in _lengths(cells, kind)]
    return line_chart(lines, x_ticks=ticks, x_label="tokens", y_label="microseconds a token")
