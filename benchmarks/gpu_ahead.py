"""What looking ahead changes on a GPU: `python -m benchmarks.gpu_ahead`. One line of JSON a result.

First whether it changes anything: random requests (greedy and drawn, stop ids and strings, kept states, prompts of many
lengths, arrivals at any step, a second turn) through an engine that waits for every step, one that looks ahead, and one
that launches several tokens of a row at a time; tokens, ends and states must be equal to the bit. Then the time of a
token with each, by turns: batches that nobody joins, and a full engine in which a request comes for each that ends.
`--tiny` runs it on a small model without a GPU, in the kernels' interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any, cast

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernels are imported

from benchmarks.gpu_decode import commit, load_model
from benchmarks.measured_model import MEASURED_MODEL
from nsm_core.config import EngineConfig
from nsm_core.engine.engine import Engine
from nsm_core.engine.request import EndState, Event, Finished, GenerationRequest, Resume
from nsm_core.execution.cuda.executor import CudaExecutor
from nsm_core.execution.cuda.options import CudaOptions, CudaWeights
from nsm_core.model.nsm import NsmModel
from nsm_core.sampling.params import SamplingParams
from nsm_core.tokenizer import BpeTokenizer

FINGERPRINT = "benchmark"
WAYS = ("waits", "ahead", "rounds")

Row = dict[str, Any]


class Subject:
    """A model and the engines made of it."""

    def __init__(self, model: NsmModel, *, has_gpu: bool) -> None:
        self.model, self.tokenizer = model, BpeTokenizer.load(MEASURED_MODEL)
        # without a GPU longer ones are read together by operations whose bits depend on that
        self._prompt_lengths = (1, 1, 5, 64, 100, 300) if has_gpu else (1,)
        self._options = CudaOptions() if has_gpu else CudaOptions(weights=CudaWeights.FP32, graphs=False)

    def engine(self, num_rows: int, way: str, *, token_budget: int = 0, records_all: bool = False) -> Engine:
        """`way`: one of WAYS. `records_all`: graphs of all sizes are recorded before it is used."""

        def make(model: NsmModel, *, num_rows: int, poison: bool) -> CudaExecutor:
            executor = CudaExecutor(model, num_rows=num_rows, poison=poison, options=self._options)
            if records_all:
                executor.record_all()
                if executor.overlap is not None and executor.overlap.rounds is not None:
                    executor.overlap.rounds.record_all()
            if executor.overlap is not None:
                executor.overlap.min_rows = 1  # where it would not pay as well
                if way != "rounds":
                    executor.overlap.rounds = None
            if way == "waits":
                executor.overlap = None
            return executor

        config = EngineConfig(max_slots=num_rows, token_budget=token_budget or max(256, 2 * num_rows), queue_limit=4096)
        return Engine(self.model, self.tokenizer, fingerprint=FINGERPRINT, config=config, executor=make)

    def random_request(self, draw: random.Random, name: str, resume: EndState | None = None) -> GenerationRequest:
        """Many end by a stop, some of them in a few tokens."""
        vocabulary = self.model.config.vocab_size
        sampling = SamplingParams(
            max_tokens=draw.randint(1, 60),
            temperature=draw.choice((0.0, 0.8, 1.0, 1.5)),
            top_p=draw.choice((1.0, 0.9)),
            seed=draw.getrandbits(60),
            ignore_eos=draw.random() < 0.5,
            stop_token_ids=tuple(draw.sample(range(min(300, vocabulary)), draw.choice((0, 3, 7)))),
            stop=draw.choice(((), (), ("\n\n", "the end"), ("the",))),
        )
        prompt_ids = tuple(draw.randrange(vocabulary) for _ in range(draw.choice(self._prompt_lengths)))
        if resume is not None and resume.pending is not None:
            prompt_ids = (resume.pending, *prompt_ids[1:])
        return GenerationRequest(
            request_id=name,
            prompt_ids=prompt_ids,
            sampling=sampling,
            keep_state=draw.random() < 0.7,
            resume=None if resume is None else _stored(resume),
        )


def _stored(end: EndState) -> Resume:
    return Resume(
        state=end.state, position=end.position, fingerprint=FINGERPRINT, generated_counts=end.generated_counts
    )


def run(engine: Engine, requests: list[GenerationRequest], seed: int) -> dict[str, list[Event]]:
    """To their ends, up to four arrivals a step; their events, with the text that their reader makes."""
    draw, waiting = random.Random(seed), list(enumerate(requests))
    texts = {request.request_id: engine.text_of(request) for request in requests if request.has_free_text}
    events: dict[str, list[Event]] = {request.request_id: [] for request in requests}
    while waiting or engine.has_work:
        for _ in range(draw.randint(0, 4)):
            if waiting:
                tag, request = waiting.pop(0)
                engine.add(request, tag=tag if engine.may_overlap else None)
        found: list[tuple[str, Event | int]] = list(engine.step())
        for name, event in (*plain_tokens(engine, requests), *found):
            whole = texts[name].event_of(event) if engine.may_overlap and name in texts else event
            events[name].append(cast(Event, whole))
    return events


def plain_tokens(engine: Engine, requests: list[GenerationRequest]) -> Iterator[tuple[str, int]]:
    """Those that the last step gave, which come before its events."""
    for batch in engine.take_tokens() if engine.may_overlap else ():
        for tag, token_id in zip(batch.tags.tolist(), batch.ids.tolist(), strict=True):
            yield requests[tag].request_id, token_id


def check_identity(subject: Subject, num_requests: int, num_rows: int) -> Iterator[Row]:
    """Two turns; the second resumes the states of the first."""
    draw = random.Random(0)
    engines = [subject.engine(num_rows, way, token_budget=16384) for way in WAYS]
    requests = [subject.random_request(draw, str(index)) for index in range(num_requests)]
    for turn in (1, 2):
        want, *others = (run(engine, requests, seed=turn) for engine in engines)
        ends = [events[-1] for events in want.values()]
        finished = [end for end in ends if isinstance(end, Finished)]
        yield {
            "turn": turn,
            "requests": len(requests),
            "tokens": sum(end.completion_tokens for end in finished),
            "stops": sum(end.reason == "stop" for end in finished),
            "states": sum(end.end_state is not None for end in finished),
            "different": [sum(got[name] != events for name, events in want.items()) for got in others],
            "ok": all(got == want for got in others),
        }
        requests = [
            subject.random_request(draw, name, events[-1].end_state)
            for name, events in want.items()
            if isinstance(events[-1], Finished) and events[-1].end_state is not None
        ]


def decode_steps(subject: Subject, batches: tuple[tuple[int, float], ...], num_tokens: int) -> Iterator[Row]:
    """Wall time of a token of all rows, while nobody joins or leaves, by turns."""
    for num_rows, temperature in batches:
        engines = {way: subject.engine(num_rows, way) for way in WAYS}
        times: dict[str, list[float]] = {name: [] for name in engines}
        for turn in range(3):
            for name, engine in engines.items():
                for index in range(num_rows):
                    sampling = SamplingParams(
                        max_tokens=num_tokens, temperature=temperature, top_p=0.95, ignore_eos=True, seed=index
                    )
                    request = GenerationRequest(
                        request_id=f"{turn}-{index}", prompt_ids=(1 + index,), sampling=sampling
                    )
                    engine.add(request, tag=index if engine.may_overlap else None)
                times[name].append(ms_of_a_token(engine))
        ms = {name: min(values) for name, values in times.items()}
        row: Row = {"rows": num_rows, "temperature": temperature}
        row |= {f"ms_{name}": value for name, value in ms.items()}
        row |= {f"tokens_per_s_{name}": round(1e3 * num_rows / value) for name, value in ms.items()}
        yield row | {"gain": ms["waits"] / min(ms.values())}


def ms_of_a_token(engine: Engine) -> float:
    """The median over the steps, without the first and the last ones."""
    steps = []
    while engine.has_work:
        before, started = engine.stats().num_steps, time.perf_counter()
        engine.step()
        engine.take_tokens()
        num_steps = engine.stats().num_steps - before
        steps.append(1e3 * (time.perf_counter() - started) / max(num_steps, 1))
    return statistics.median(steps[2:-2])


def arriving(subject: Subject, num_rows: int, num_requests: int, prompt_len: int, *, keep_state: bool) -> Iterator[Row]:
    """A full engine: for each request that ends another one comes, with a prompt."""
    row: Row = {"rows": num_rows, "requests": num_requests, "prompt": prompt_len, "keep_state": keep_state}
    for name in WAYS:
        draw = random.Random(0)
        engine = subject.engine(num_rows, name, token_budget=16384, records_all=True)
        for index in range(num_requests):
            sampling = SamplingParams(max_tokens=draw.randint(32, 160), temperature=1.0, seed=index, ignore_eos=True)
            prompt = tuple(draw.randrange(1, 256) for _ in range(prompt_len))
            request = GenerationRequest(
                request_id=str(index), prompt_ids=prompt, sampling=sampling, keep_state=keep_state
            )
            engine.add(request, tag=index if engine.may_overlap else None)
        for _ in range(3):
            engine.step()
        before, started = engine.stats(), time.perf_counter()
        while engine.stats().num_waiting:
            engine.step()
            engine.take_tokens()
        seconds, after = time.perf_counter() - started, engine.stats()
        num_steps = after.num_steps - before.num_steps
        row[f"tokens_per_s_{name}"] = round((after.tokens_generated - before.tokens_generated) / seconds)
        row[f"ms_{name}"] = 1e3 * seconds / max(num_steps, 1)
    yield row | {"gain": row["tokens_per_s_rounds"] / max(row["tokens_per_s_waits"], 1)}


def say(part: str, row: Row) -> None:
    shown = {key: float(f"{value:.5g}") if isinstance(value, float) else value for key, value in row.items()}
    print(json.dumps({"part": part} | shown), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000, help="of the comparison")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    if not (has_gpu or options.tiny):
        sys.exit("benchmarks.gpu_ahead needs a GPU; --tiny runs it anywhere")
    device = torch.device("cuda" if has_gpu else "cpu")
    say("header", {"commit": commit(), "torch": torch.__version__, "device": str(device)})
    subject = Subject(load_model(options.tiny, device), has_gpu=has_gpu)
    is_good = True
    for row in check_identity(subject, options.requests, 2 if options.tiny else 64):
        say("identity", row)
        is_good = is_good and row["ok"]
    sizes = (1,) if options.tiny else (1, 8, 16, 32, 64, 256, 512)
    batches = (*((num_rows, 0.0) for num_rows in sizes), (sizes[-1], 1.0))
    for row in decode_steps(subject, batches, 6 if options.tiny else 64):
        say("decode", row)
    for keep_state in () if options.tiny else (False, True):
        for row in arriving(subject, 512, 2048, 64, keep_state=keep_state):
            say("arriving", row)
    say("end", {"ok": is_good})
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
