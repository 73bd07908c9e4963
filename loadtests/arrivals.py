"""When requests arrive, and how long they are: public traces, brought to the rate and the lengths of a small model.

The clock of an open loop is the trace, not the server: a request that has to wait is late, and its latency counts from
when it should have been sent.
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import io
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import zstandard

from loadtests.errors import RunError

TRACES = Path(__file__).resolve().parent / "traces"


@dataclasses.dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace. `conversation`: requests with the same number continue each other, in order."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    conversation: int


@dataclasses.dataclass(frozen=True, slots=True)
class Arrival:
    """One request to send. `at_s`: seconds after the start of the run; `turn`: 0 is a conversation's first."""

    number: int
    step: str
    at_s: float
    prompt_tokens: int
    output_tokens: int
    conversation: int
    turn: int


def read_trace(path: Path) -> list[TraceRow]:
    """Azure's CSV (TIMESTAMP, ContextTokens, GeneratedTokens) or Mooncake's JSON lines, as they are published; also in
    Zstandard (.zst). Raises RunError for a file that is not there, is no such trace, or has no request.
    """
    try:
        name, text = path.name.removesuffix(".zst"), _read_text(path)
        rows = list(_read_azure(text) if name.endswith(".csv") else _read_mooncake(text))
    except (OSError, zstandard.ZstdError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"trace {path}: {type(error).__name__}: {error}") from error
    if not rows:
        raise RunError(f"trace {path} has no request")
    return rows


def _read_text(path: Path) -> str:
    raw = path.read_bytes()
    if path.suffix == ".zst":
        raw = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(raw)).read()
    return raw.decode()


def _read_azure(text: str) -> Iterator[TraceRow]:
    start = None
    for number, row in enumerate(csv.DictReader(io.StringIO(text))):
        at = datetime.datetime.fromisoformat(row["TIMESTAMP"])
        start = start or at
        at_s = (at - start).total_seconds()
        yield TraceRow(at_s, int(row["ContextTokens"]), int(row["GeneratedTokens"]), number)


def _read_mooncake(text: str) -> Iterator[TraceRow]:
    """A request continues the latest one whose blocks (but its last, which may be part-filled) are all at its front."""
    conversations: dict[tuple[int, ...], int] = {}  # by the blocks of its newest request
    for number, line in enumerate(text.splitlines()):
        row = json.loads(line)
        blocks = tuple(row["hash_ids"])
        known = (blocks[:length] for length in range(len(blocks) - 1, 0, -1))
        found = next((prefix for prefix in known if prefix in conversations), None)
        conversation = number if found is None else conversations.pop(found)
        if len(blocks) > 1:
            conversations[blocks[:-1]] = conversation
        yield TraceRow(row["timestamp"] / 1000, row["input_length"], row["output_length"], conversation)


def at_rate(rows: Sequence[TraceRow], rate: float) -> list[TraceRow]:
    """The rows with their gaps stretched or shrunk, all alike, to `rate` requests a second on average."""
    span_s = rows[-1].at_s - rows[0].at_s
    factor = (len(rows) - 1) / rate / span_s if span_s else 0.0
    return [dataclasses.replace(row, at_s=(row.at_s - rows[0].at_s) * factor) for row in rows]


def plan_arrivals(
    rows: Sequence[TraceRow],
    steps: Sequence[tuple[str, float, float]],
    *,
    length_scale: float,
    max_output: int,
    pause_s: float = 0.0,
) -> list[Arrival]:
    """One stretch of the trace after the other. `steps`: (name, requests a second, seconds) of each, with `pause_s`
    after each.

    A step takes as many rows as its rate has room for, at least one, where the step before ended; the trace begins anew
    at its end. `length_scale`: factor on the lengths in tokens; an output has 1 to `max_output`.
    """
    source = itertools.cycle(rows)
    arrivals: list[Arrival] = []
    turns: dict[int, int] = {}
    start_s = 0.0
    for name, rate, seconds in steps:
        taken = list(itertools.islice(source, max(1, round(rate * seconds))))
        for row in at_rate(_in_order(taken), rate):
            turn = turns[row.conversation] = turns.get(row.conversation, -1) + 1
            lengths = (round(row.prompt_tokens * length_scale), round(row.output_tokens * length_scale))
            prompt, output = max(1, lengths[0]), min(max(1, lengths[1]), max_output)
            at_s = start_s + row.at_s
            arrivals.append(Arrival(len(arrivals), name, at_s, prompt, output, row.conversation, turn))
        start_s += seconds + pause_s
    return arrivals


def _in_order(rows: Sequence[TraceRow]) -> list[TraceRow]:
    """Rows that went over the trace's end go on after it, a mean gap later."""
    gap_s = (max(row.at_s for row in rows) - min(row.at_s for row in rows)) / len(rows)
    ordered, offset_s = [rows[0]], 0.0
    for before, row in itertools.pairwise(rows):
        if row.at_s < before.at_s:
            offset_s += before.at_s - row.at_s + gap_s
        ordered.append(dataclasses.replace(row, at_s=row.at_s + offset_s))
    return ordered


def share_of(arrivals: Sequence[Arrival], index: int, count: int) -> list[Arrival]:
    """What one of `count` processes sends: whole conversations, so that their turns stay in order."""
    return [arrival for arrival in arrivals if arrival.conversation % count == index]
