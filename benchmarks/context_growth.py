"""What a turn costs as its context grows: `python -m benchmarks.context_growth --pictures benchmarks/results`.

The stock `openai` client against `nsm serve` with pulse-books and SQLite. Two tables, then one line of JSON:

- 50 turns deep: responses that continue each other, and a stateless chat (streamed and not) on stored prefixes. Tokens
  computed in a turn, the time from the request sent to the first text received (not streamed: to the answer), and
  the server's processor time for the whole turn, which a busy machine does not distort.
- To 100K tokens: a long message brings each conversation to the next length, then a few short turns are measured there;
  beside them the same chat with `"cache_prompt": false`, whose prompt is read from its start each time, up to
  `--read-again-to`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai

from benchmarks.response_chain import QUESTION, Served, measure_turn, serving
from nsm_lab.charts import Line, line_chart
from nsm_lab.provenance import command_line, source_commit

CONTEXTS = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)
KINDS = ("responses", "chat", "chat, not streamed", "chat, all read again")
DEEP_KINDS, LONG_KINDS = KINDS[:3], (KINDS[0], KINDS[1], KINDS[3])
SYSTEM = "A traveller tells what happened to him in the north, and a friend asks him about it. " * 4
SENTENCE = "On day {number} we went on along the river until it was dark, and nobody spoke of what lay behind us. "
NUM_COMPARED = 5  # turns: the last ones against those from the second on


@dataclasses.dataclass(slots=True)
class Conversation:
    """One conversation of one of KINDS; each turn returns its context and computed tokens, `first_ms` and `cpu_ms`."""

    served: Served
    model: str
    kind: str
    num_tokens: int  # sampled in a turn
    previous: str | None = None
    messages: list[Any] = dataclasses.field(default_factory=lambda: [{"role": "system", "content": SYSTEM}])

    def say(self, text: str) -> dict[str, float]:
        before = self.served.cpu_ms()
        row = self._respond(text) if self.kind == "responses" else self._chat(text)
        measured = {name: row[name] for name in ("context_tokens", "computed_tokens", "first_ms")}
        return {**measured, "cpu_ms": self.served.cpu_ms() - before}

    def _respond(self, text: str) -> dict[str, Any]:
        row = measure_turn(self.served.client, self.model, self.previous, num_tokens=self.num_tokens, text=text)
        self.previous = row["id"]
        return {**row, "first_ms": row["ttft_ms"]}

    def _chat(self, text: str) -> dict[str, float]:
        self.messages.append({"role": "user", "content": text})
        start = time.perf_counter()
        answer, usage, first_ms = self._streamed(start) if self.kind != "chat, not streamed" else self._whole(start)
        self.messages.append({"role": "assistant", "content": answer})
        if usage is None:
            raise RuntimeError("the answer has no usage")
        computed = usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens
        return {"context_tokens": usage.prompt_tokens, "computed_tokens": computed, "first_ms": first_ms}

    def _fields(self) -> dict[str, Any]:
        options = {"ignore_eos": True, "cache_prompt": self.kind != "chat, all read again"}
        limits = {"max_completion_tokens": self.num_tokens, "seed": 0}
        return {"model": self.model, "messages": self.messages, "extra_body": options, **limits}

    def _streamed(self, start: float) -> tuple[str, Any, float]:
        text, usage, first_ms = "", None, 0.0
        stream = self.served.client.chat.completions.create(
            stream=True, stream_options={"include_usage": True}, **self._fields()
        )
        for chunk in stream:
            piece = chunk.choices[0].delta.content if chunk.choices else None
            if piece and not text:
                first_ms = (time.perf_counter() - start) * 1000
            text, usage = text + (piece or ""), chunk.usage or usage
        return text, usage, first_ms

    def _whole(self, start: float) -> tuple[str, Any, float]:
        answer = self.served.client.chat.completions.create(**self._fields())
        return answer.choices[0].message.content or "", answer.usage, (time.perf_counter() - start) * 1000


def measure_depth(served: Served, model: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """For each kind and place in the conversation the medians over the conversations."""
    for kind in DEEP_KINDS:
        rows_of = []
        for number in range(args.conversations):
            conversation = Conversation(served, model, kind, args.tokens)
            rows_of.append([conversation.say(f"{number}-{turn}: {QUESTION}") for turn in range(args.turns)])
        for turn, rows in enumerate(zip(*rows_of, strict=True), start=1):
            yield {"kind": kind, "turn": turn, **medians(rows)}


def measure_growth(served: Served, model: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """For each kind and length the medians over its short turns; a kind that reads all has one turn at each length."""
    sentence_tokens = tokens_of_sentence(served.client, model)
    for kind in LONG_KINDS:
        conversation, context, number = Conversation(served, model, kind, args.tokens), 0.0, 0
        longest = args.read_again_to if kind == "chat, all read again" else max(args.contexts)
        for target in (context for context in args.contexts if context <= longest):
            num_sentences = max(1, round((target - context) / sentence_tokens))
            text = "".join(SENTENCE.format(number=number + index) for index in range(num_sentences))
            number += num_sentences
            rows = [conversation.say(text)]
            if kind != "chat, all read again":
                rows = [conversation.say(QUESTION) for _ in range(args.short_turns)]
            context = rows[-1]["context_tokens"]
            yield {"kind": kind, **medians(rows)}


def tokens_of_sentence(client: openai.OpenAI, model: str) -> float:
    text = "".join(SENTENCE.format(number=number) for number in range(100, 140))
    usage = client.completions.create(model=model, prompt=text, max_tokens=1).usage
    if usage is None:
        raise RuntimeError("the completion has no usage")
    return usage.prompt_tokens / 40


def medians(rows: Any) -> dict[str, float]:
    return {name: round(statistics.median(row[name] for row in rows), 2) for name in rows[0]}


def ratio(rows: list[dict[str, Any]], kind: str, name: str) -> float:
    """Of the times called `name`: the last turns over those from the second on."""
    times = [row[name] for row in rows if row["kind"] == kind]
    return round(statistics.median(times[-NUM_COMPARED:]) / statistics.median(times[1 : 1 + NUM_COMPARED]), 3)


def show(rows: list[dict[str, Any]]) -> None:
    names = f"{'turn':>6} {'context tokens':>15} {'computed tokens':>16} {'first text, ms':>15} {'turn, CPU ms':>13}"
    print(f"{'':<22} {names}")
    for row in rows:
        counts = f"{row['context_tokens']:>15.0f} {row['computed_tokens']:>16.0f}"
        times = f"{row['first_ms']:>15.1f} {row['cpu_ms']:>13.0f}"
        print(f"{row['kind']:<22} {row.get('turn', ''):>6} {counts} {times}")


def draw(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Two pictures: beside reading all again, the time to the first text; the kept states alone, processor time."""
    ticks = [(float(context), f"{context // 1000}K") for context in args.contexts]
    for name, kinds, measure, scale, label in (
        ("context_growth.svg", LONG_KINDS, "first_ms", 1000.0, "seconds to the first text"),
        ("context_growth-kept.svg", LONG_KINDS[:2], "cpu_ms", 1.0, "milliseconds of processor time for a short turn"),
    ):
        lines = [
            Line(kind, tuple((row["context_tokens"], row[measure] / scale) for row in rows if row["kind"] == kind))
            for kind in kinds
        ]
        picture = line_chart(lines, x_ticks=ticks, x_label="tokens of context", y_label=label, y_low=0.0)
        (args.pictures / name).write_text(picture, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=50, help="depth of the first table, at least 2")
    parser.add_argument("--conversations", type=int, default=3, help="of each kind in the first table")
    parser.add_argument("--tokens", type=int, default=8, help="sampled in each turn")
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, help="lengths in the second table, rising")
    parser.add_argument(
        "--read-again-to", type=int, default=20_000, help="longest prompt that is read from its start in each turn"
    )
    parser.add_argument("--short-turns", type=int, default=5, help="at each length")
    parser.add_argument("--pictures", type=Path, default=None, help="directory for the curves as SVG")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, serving(directory) as served:
        model = served.client.models.list().data[0].id
        Conversation(served, model, "responses", args.tokens).say(QUESTION)  # warm-up
        depth = list(measure_depth(served, model, args))
        growth = list(measure_growth(served, model, args))
    print(f"$ {command_line()}")
    show([row for row in depth if row["turn"] in (1, 2, 5, 10, 20, 50, args.turns)])
    ratios = {name: {kind: ratio(depth, kind, name) for kind in DEEP_KINDS} for name in ("first_ms", "cpu_ms")}
    print(f"\nlast {NUM_COMPARED} turns over turns 2 to {1 + NUM_COMPARED}")
    print(*(f"{name}: {found}" for name, found in ratios.items()), sep="\n", end="\n\n")
    show(growth)
    if args.pictures is not None:
        draw(growth, args)
    fields = {
        "benchmark": "context_growth",
        "commit": source_commit(),
        "model": model,
        "device": platform.machine(),
        "num_cores": os.cpu_count(),
        "last_over_second": ratios,
        "depth": depth,
        "growth": growth,
    }
    print(json.dumps(fields))


if __name__ == "__main__":
    main()
