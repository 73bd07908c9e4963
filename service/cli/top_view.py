"""One frame of `nsm top`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from service.cli.output import printable
from service.cli.scrape import Interval

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

NONE = "–"
BAR = 8  # columns: all boxes fit on 80 by 24
QUANTILES = (0.5, 0.95, 0.99)
LATENCIES = (
    ("queue", "nsm_request_queue_time_seconds"),
    ("prefill", "nsm_request_prefill_time_seconds"),
    ("first token", "nsm_time_to_first_token_seconds"),
    ("next token", "nsm_inter_token_latency_seconds"),
    ("end to end", "nsm_e2e_request_latency_seconds"),
    ("state read", "nsm_state_fetch_seconds"),
    ("state commit", "nsm_state_commit_seconds"),
)
PROMPT_TOKENS = ("nsm_tokens_computed_total", "nsm_tokens_resumed_total")

Rows = Sequence[tuple[str, ...]]


def render(interval: Interval, url: str, trouble: str = "") -> RenderableType:
    """Four boxes: requests and batch, latency, sessions, energy. `trouble`: why the numbers are old."""
    from rich.columns import Columns
    from rich.console import Group
    from rich.text import Text

    boxes = (
        _box("batch", _batch(interval)),
        _box("latency", _latency(interval), "", *(f"p{q * 100:g}" for q in QUANTILES)),
        _box("sessions", _sessions(interval)),
        _box("energy", _energy(interval)),
    )
    head = [Text(_headline(interval, url), style="bold"), Text(printable(trouble), style="red")]
    return Group(*(line for line in head if line.plain), Columns(boxes, padding=(0, 1)))


def _headline(interval: Interval, url: str) -> str:
    name = interval.after.label("nsm_model_info", "model_name")
    clock = time.strftime("%H:%M:%S")
    return printable(f"{name} at {url}  {clock}  rates over {interval.seconds:.3g} s")


def _box(title: str, rows: Rows, *header: str) -> RenderableType:
    from rich.panel import Panel
    from rich.table import Table

    table: Table = Table(box=None, pad_edge=False, collapse_padding=True, show_header=bool(header))
    for number, name in enumerate(header or [""] * len(rows[0])):
        table.add_column(name, justify="right" if number else "left", no_wrap=True, min_width=0)
    for row in rows:
        table.add_row(*(printable(cell) for cell in row))
    return Panel(table, title=title, title_align="left", padding=0, expand=False)


def _batch(interval: Interval) -> Rows:
    now = interval.after
    running, slots = now.total("nsm_num_requests_running"), now.total("nsm_max_slots")
    steps = interval.rate("nsm_engine_steps_total")
    generated = interval.rate("nsm_generation_tokens_total")
    processed = _sum(generated, interval.rate("nsm_tokens_computed_total"))
    return (
        ("slots", f"{_bar(running, slots)} {_count(running)} of {_count(slots)}"),
        ("waiting", _count(now.total("nsm_num_requests_waiting"))),
        ("requests/s", _figure(interval.rate("nsm_http_requests_total"))),
        ("server errors/s", _figure(_server_errors(interval))),
        ("refused/s", _figure(interval.rate("nsm_rejected_total"))),
        ("generated tokens/s", _figure(generated)),
        ("steps/s", _figure(steps)),
        ("tokens in a step", _figure(_over(processed, steps))),
        ("memory", _bytes(now.total("nsm_process_resident_memory_bytes"))),
        ("state pool", _bytes(now.total("nsm_state_pool_bytes"))),
        ("CPU cores", _figure(interval.rate("nsm_process_cpu_seconds_total"))),
    )


def _latency(interval: Interval) -> Rows:
    return [(name, *(_duration(interval.quantile(q, histogram)) for q in QUANTILES)) for name, histogram in LATENCIES]


def _sessions(interval: Interval) -> Rows:
    now = interval.after
    mean_size = interval.ratio("nsm_state_bytes_sum", ["nsm_state_bytes_count"])
    states = interval.rates("nsm_session_resume_total", "outcome")
    return (
        ("turns committed/s", _figure(interval.rate("nsm_state_commit_seconds_count"))),
        ("without their client", _count(now.total("nsm_turns_detached"))),
        ("states used as stored/s", _figure(states.pop("hit", None))),
        ("made again, or not usable/s", _figure(sum(states.values()) if states else None)),
        ("prompt tokens not computed", _share(interval.ratio("nsm_tokens_resumed_total", PROMPT_TOKENS))),
        ("size of a state", _bytes(mean_size)),
        ("leases lost", _count(now.total("nsm_lease_lost_total"))),
        ("conflicts", _count(now.total("nsm_commit_conflict_total"))),
    )


def _energy(interval: Interval) -> Rows:
    watts = interval.rates("nsm_energy_joules_total", "source")
    per_token = interval.ratio("nsm_energy_joules_total", ["nsm_generation_tokens_total"])
    return (
        *((source, f"{_figure(power)} W") for source, power in sorted(watts.items())),
        ("each generated token", NONE if per_token is None else f"{_figure(per_token)} J"),
        ("since the start", _joules(interval.after.total("nsm_energy_joules_total"))),
    )


def _server_errors(interval: Interval) -> float | None:
    by_status = interval.rates("nsm_http_requests_total", "status")
    return sum(rate for status, rate in by_status.items() if status.startswith("5")) if by_status else None


def _bar(part: float | None, whole: float | None) -> str:
    filled = round(BAR * min(1.0, part / whole)) if part and whole else 0
    return "█" * filled + "·" * (BAR - filled)


def _sum(*values: float | None) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _over(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _count(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}"


def _figure(value: float | None) -> str:
    """Three digits that mean something."""
    return NONE if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _share(value: float | None) -> str:
    return NONE if value is None else f"{value:.1%}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return NONE
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _bytes(value: float | None) -> str:
    if value is None:
        return NONE
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"


def _joules(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{value:.3g} J" if value < 1000 else f"{value / 1000:,.3g} kJ"
