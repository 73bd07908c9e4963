"""What drafts of tokens cost and give in the engine, on a CPU: `python -m benchmarks.speculation`.

Two engines on one model, without and with drafts, answer the same requests by turns: openings of pieces of the test
books, the same with a passage that comes twice, and sampled ones. Tokens per CPU second of decoding; reading prompts is
not counted. "drafted all the same" drafts for sampled texts too, which hardly ever repeat themselves: the price where
drafts do not come true. Every run compares all events and the states at the end, to the bit.

`--identity 1000` compares so many random requests instead: stops, log-probabilities, several at a time, second turns.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import torch

from benchmarks.measured_model import MEASURED_MODEL
from nsm_core.config import EngineConfig
from nsm_core.engine.engine import Engine
from nsm_core.engine.request import Event, Finished, GenerationRequest, Resume
from nsm_core.execution.choose import choose_executor
from nsm_core.model.loader import LoadedNsm, load_checkpoint
from nsm_core.sampling.params import SamplingParams
from nsm_core.stats import EngineStats
from nsm_lab.provenance import source_commit
from nsm_lab.training.data_files import read_documents

BOOKS = Path("data/books-sample")
MAX_BATCH = 8
KINDS = ("greedy", "greedy, a passage twice", "sampled", "sampled, drafted all the same")

EventsById = dict[str, list[Event]]


class Pair:
    """Two engines, without and with drafts, on the weights of one executor."""

    def __init__(self, loaded: LoadedNsm) -> None:
        chosen = choose_executor(loaded, "native")
        self.fingerprint, self.encode = loaded.fingerprint, loaded.tokenizer.encode
        self.plain, self.drafting = (
            Engine(
                chosen.model,
                loaded.tokenizer,
                fingerprint=loaded.fingerprint,
                config=EngineConfig(max_slots=MAX_BATCH, speculation=speculation),
                executor=chosen.factory,
            )
            for speculation in ("off", "lookup")
        )
        self._drafts_first = False

    def compare(self, requests: Sequence[GenerationRequest]) -> tuple[EventsById, float, float]:
        """What both gave, and the CPU seconds of each. Raises RuntimeError where they differ."""
        self._drafts_first = not self._drafts_first  # whoever goes second finds the caches warm
        if self._drafts_first:
            got, drafting_s = run(self.drafting, requests)
        want, plain_s = run(self.plain, requests)
        if not self._drafts_first:
            got, drafting_s = run(self.drafting, requests)
        for request in requests:
            if got[request.request_id] != want[request.request_id]:
                raise RuntimeError(f"drafts have changed what this request gives: {request}")
        return want, plain_s, drafting_s


def run(engine: Engine, requests: Sequence[GenerationRequest]) -> tuple[EventsById, float]:
    """All events, and the CPU seconds of the steps that read no prompt."""
    events_by_id: EventsById = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    seconds = 0.0
    while engine.has_work:
        num_read, started = engine.stats().tokens_computed, time.process_time()
        for request_id, event in engine.step():
            events_by_id[request_id].append(event)
        if engine.stats().tokens_computed == num_read:
            seconds += time.process_time() - started
    return events_by_id, seconds


@dataclasses.dataclass(slots=True)
class Tally:
    """Of one kind of text at one batch size."""

    num_tokens: int = 0
    plain_s: float = 0.0
    drafting_s: float = 0.0
    num_drafted: int = 0
    num_accepted: int = 0

    def add(
        self, events_by_id: EventsById, plain_s: float, drafting_s: float, before: EngineStats, now: EngineStats
    ) -> None:
        self.num_tokens += sum(ended(events).completion_tokens - 1 for events in events_by_id.values())
        self.plain_s += plain_s
        self.drafting_s += drafting_s
        self.num_drafted += now.num_draft_tokens - before.num_draft_tokens
        self.num_accepted += now.num_accepted_tokens - before.num_accepted_tokens

    def figures(self) -> dict[str, float]:
        return {
            "plain_tokens_per_cpu_s": self.num_tokens / self.plain_s,
            "tokens_per_cpu_s": self.num_tokens / self.drafting_s,
            "ratio": self.plain_s / self.drafting_s,
            "drafted": self.num_drafted / self.num_tokens,
            "accepted": self.num_accepted / max(1, self.num_drafted),
        }


def ended(events: Sequence[Event]) -> Finished:
    last = events[-1]
    if not isinstance(last, Finished) or last.error is not None:
        raise RuntimeError(f"a request ended with {last}")
    return last


@contextlib.contextmanager
def drafting(kind: str) -> Iterator[None]:
    """For sampled texts too, where the kind says so."""
    if not kind.endswith("all the same"):
        yield
        return
    with mock.patch("nsm_core.engine.speculation.may_be_drafted", return_value=True):
        yield


def measure(pair: Pair, prompts: list[list[int]], kind: str, batch: int, num_tokens: int) -> Tally:
    """All prompts, `batch` at a time."""
    tally = Tally()
    temperature = 1.0 if kind.startswith("sampled") else 0.0
    for start in range(0, len(prompts) - batch + 1, batch):
        requests = [
            GenerationRequest(
                request_id=str(index),
                prompt_ids=tuple(prompt + prompt if kind.endswith("twice") else prompt),
                sampling=SamplingParams(
                    max_tokens=num_tokens, temperature=temperature, seed=start + index, ignore_eos=True
                ),
                keep_state=True,
            )
            for index, prompt in enumerate(prompts[start : start + batch])
        ]
        before = pair.drafting.stats()
        with drafting(kind):
            events_by_id = pair.compare(requests)
        tally.add(*events_by_id, before, pair.drafting.stats())
    return tally


def read_books(encode: Callable[[str], list[int]]) -> list[list[int]]:
    return [encode(document.text) for document in read_documents(BOOKS, "test")]


def openings(books: list[list[int]], number: int, length: int) -> list[list[int]]:
    """Of pieces of equal length, by turns."""
    stride = max(length, sum(map(len, books)) // number)
    starts = [(book, start) for book in books for start in range(0, len(book) - length, stride)]
    return [book[start : start + length] for book, start in starts[:number]]


def draw_request(draw: random.Random, books: list[list[int]], name: str, resume: Resume | None) -> GenerationRequest:
    """Up to 30 tokens of a book, once or again and again, and up to 48 tokens after them."""
    book = draw.choice(books)
    start, length = draw.randrange(len(book) - 30), draw.randint(1, 30)
    prompt = book[start : start + length] * draw.choice((1, 2, 3))
    stop = draw.choice(((), (), (" the",), (",", ". "), ("\n",), (" and the", "ing to")))
    sampling = SamplingParams(
        max_tokens=draw.randint(1, 48),
        temperature=draw.choice((0.0, 0.0, 0.0, 0.8)),
        seed=draw.randrange(2**32),
        logprobs=draw.choice((None, None, 3)),
        repetition_penalty=draw.choice((1.0, 1.0, 1.0, 1.2)),
        stop=stop,
        stop_token_ids=tuple(draw.sample(book, 3)) if draw.random() < 0.2 else (),
    )
    return GenerationRequest(
        request_id=name, prompt_ids=tuple(prompt), sampling=sampling, resume=resume, keep_state=True
    )


def check_identity(pair: Pair, books: list[list[int]], number: int, *, seed: int = 0) -> EngineStats:
    """Compares `number` requests, 1 to 6 at a time; a third of them go on where one before has ended.

    Returns the counters of the engine that drafts. Raises RuntimeError where anything differs.
    """
    draw, num_done = random.Random(seed), 0
    ends: list[Finished] = []
    while num_done < number:
        num_rows = min(number - num_done, draw.choice((1, 1, 1, 2, 3, 4, 6)))
        requests = []
        for index in range(num_rows):
            goes_on = bool(ends) and draw.random() < 0.33
            resume = resume_of(draw.choice(ends), pair.fingerprint) if goes_on else None
            requests.append(draw_request(draw, books, f"{num_done}-{index}", resume))
        events_by_id, _, _ = pair.compare(requests)
        ends = [*ends, *(ended(events) for events in events_by_id.values())][-16:]
        num_done += num_rows
    return pair.drafting.stats()


def resume_of(end: Finished, fingerprint: str) -> Resume | None:
    """Of an end with a token still to be read the state alone: the next text begins without it."""
    end_state = end.end_state
    if end_state is None:
        return None
    return Resume(
        state=end_state.state,
        position=end_state.position,
        fingerprint=fingerprint,
        generated_counts=end_state.generated_counts,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--identity", type=int, metavar="N", help="compare N random requests and measure nothing")
    parser.add_argument("--texts", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="to decode after each")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--model", type=Path, default=MEASURED_MODEL, help="model directory or name")
    args = parser.parse_args()
    torch.set_num_threads(1)
    pair = Pair(load_checkpoint(args.model))
    books = read_books(pair.encode)
    if args.identity is not None:
        stats = check_identity(pair, books, args.identity)
        print(
            f"{args.identity} requests gave the same, to the bit: {stats.tokens_generated} tokens, "
            f"{stats.num_draft_tokens} drafted, {stats.num_accepted_tokens} of them accepted"
        )
        return
    prompts = openings(books, args.prompts, args.prompt_tokens)
    print(f"{'text':<30}{'batch':>6}{'plain':>8}{'drafts':>8}{'ratio':>7}{'drafted a token':>17}{'accepted':>10}")
    runs = []
    for kind in args.texts:
        for batch in args.batches:
            figures = measure(pair, prompts, kind, batch, args.tokens).figures()
            runs.append({"text": kind, "batch": batch, **figures})
            print(
                f"{kind:<30}{batch:>6}{figures['plain_tokens_per_cpu_s']:>8.0f}{figures['tokens_per_cpu_s']:>8.0f}"
                f"{figures['ratio']:>6.2f}x{figures['drafted']:>17.2f}{figures['accepted']:>10.0%}"
            )
    print(json.dumps({"commit": source_commit(), "model": args.model.name, "num_prompts": len(prompts), "runs": runs}))


if __name__ == "__main__":
    main()
