"""What a form costs: `python -m benchmarks.constrained_step`. A table, then one line of JSON.

One engine decodes blocks of tokens for rows that are free, and for rows that are held to a JSON schema, in turns. CPU
time of the whole process, all threads together: a busy neighbour changes it little, and the median of the pairs less.
With `--device cuda` it is the time that passes.
The answers are lists of records with enums, numbers, booleans, free and short strings, long enough for all blocks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nsm_core.config import EngineConfig
from nsm_core.engine.engine import Engine
from nsm_core.engine.request import GenerationRequest, TokenEvent
from nsm_core.execution.choose import choose_executor
from nsm_core.grammars.grammar import Grammar, json_schema_grammar
from nsm_core.model.bundled import find_checkpoint
from nsm_core.model.loader import load_checkpoint
from nsm_core.sampling.params import SamplingParams
from nsm_lab.provenance import source_commit

RECORD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 40},
        "note": {"type": "string", "maxLength": 200},
        "kind": {"enum": ["tale", "novel", "poem"]},
        "year": {"type": "integer", "minimum": 1800, "maximum": 1900},
        "is_long": {"type": "boolean"},
    },
    "required": ["title", "note", "kind", "year", "is_long"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": RECORD, "minItems": 500}
MAX_TOKENS = 4000


class Blocks:
    """Requests of one kind in one engine, decoded block by block."""

    def __init__(
        self, engine: Engine, name: str, num_rows: int, grammar: Grammar | None, clock: Callable[[], float]
    ) -> None:
        self._engine, self._name, self._num_rows, self._grammar = engine, name, num_rows, grammar
        self._clock = clock
        self._turn = 0

    def us_per_token(self, num_steps: int) -> float:
        """Microseconds by the clock, a token of a block, and what the rows sampled is thrown away after."""
        self._turn += 1
        requests = [self._request(row) for row in range(self._num_rows)]
        for request in requests:
            self._engine.add(request)
        for _ in range(8):  # prompts, and the first tokens of the form
            self._engine.step()
        num_tokens, started = 0, self._clock()
        for _ in range(num_steps):
            num_tokens += sum(isinstance(event, TokenEvent) for _, event in self._engine.step())
        seconds = self._clock() - started
        if num_tokens != num_steps * self._num_rows:
            raise RuntimeError(f"{num_tokens} tokens in {num_steps} steps of {self._num_rows} rows")
        self._engine.abort_all()
        return seconds / num_tokens * 1e6

    def _request(self, row: int) -> GenerationRequest:
        sampling = SamplingParams(
            max_tokens=MAX_TOKENS, seed=self._turn * 1000 + row, grammar=self._grammar, ignore_eos=self._grammar is None
        )
        return GenerationRequest(
            request_id=f"{self._name}-{self._turn}-{row}", prompt_ids=(1, row + 2), sampling=sampling
        )


def measure(model: str, device: str, num_rows: int, num_steps: int, num_pairs: int) -> dict[str, Any]:
    loaded = load_checkpoint(find_checkpoint(Path(model)), device)
    chosen = choose_executor(loaded)
    budget = max(256, num_rows)
    config = EngineConfig(max_slots=num_rows, token_budget=budget, queue_limit=num_rows, speculation="off")
    engine = Engine(
        chosen.model, loaded.tokenizer, fingerprint=loaded.fingerprint, config=config, executor=chosen.factory
    )
    clock = time.process_time if device == "cpu" else time.perf_counter
    free = Blocks(engine, "free", num_rows, None, clock)
    held = Blocks(engine, "held", num_rows, json_schema_grammar(SCHEMA, param="schema"), clock)
    free.us_per_token(num_steps)
    held.us_per_token(num_steps)
    pairs = [(free.us_per_token(num_steps), held.us_per_token(num_steps)) for _ in range(num_pairs)]
    ratios = sorted(with_form / without for without, with_form in pairs)
    return {
        "model": model,
        "executor": chosen.name,
        "device": device,
        "rows": num_rows,
        "steps_a_block": num_steps,
        "pairs": num_pairs,
        "free_us": round(statistics.median(without for without, _ in pairs), 1),
        "held_us": round(statistics.median(with_form for _, with_form in pairs), 1),
        "added_percent": round((statistics.median(ratios) - 1) * 100, 2),
        "added_percent_range": [round((ratio - 1) * 100, 2) for ratio in (ratios[0], ratios[-1])],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="pulse-books")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--pairs", type=int, default=9)
    given = parser.parse_args()
    torch.set_num_threads(1)
    results = [measure(given.model, given.device, rows, given.steps, given.pairs) for rows in given.rows]
    print("rows  free us/token  held us/token  added (median of pairs; all of them)")
    for one in results:
        low, high = one["added_percent_range"]
        print(
            f"{one['rows']:4}  {one['free_us']:13}  {one['held_us']:13}  "
            f"{one['added_percent']:+.1f} % ({low:+.1f} to {high:+.1f})"
        )
    print(json.dumps({"commit": source_commit(), "results": results}))


if __name__ == "__main__":
    main()
