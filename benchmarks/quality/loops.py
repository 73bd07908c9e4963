"""How much of what a model samples repeats itself: `python -m benchmarks.quality.loops`.

Continuations of passages from books of data/books-sample that training left out. A token counts as repeated if the
eight tokens that end with it stand earlier in the same continuation. Prints a Markdown table: temperatures down, models
across; in brackets the continuations of which more than a third is repeated.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from nsm_core.config import EngineConfig
from nsm_core.engine.engine import Engine
from nsm_core.engine.request import Finished, GenerationRequest
from nsm_core.execution.native.executor import NativeExecutor
from nsm_core.model.bundled import CHECKPOINTS
from nsm_core.model.loader import load_checkpoint
from nsm_core.sampling.params import SamplingParams
from nsm_lab.training.data_files import read_documents

BOOKS = Path(__file__).parents[2] / "data/books-sample"
GRAM = 8
STEP, CHARACTERS = 2_000, 2_000  # from passage to passage, and enough for a prompt
LOOP_SHARE = 1 / 3


def repeated_share(ids: Sequence[int]) -> float:
    """Of the tokens that end a run of GRAM tokens, those whose run has been there before."""
    grams = [tuple(ids[end - GRAM : end]) for end in range(GRAM, len(ids) + 1)]
    seen: set[tuple[int, ...]] = set()
    repeated = 0
    for gram in grams:
        repeated += gram in seen
        seen.add(gram)
    return repeated / max(1, len(grams))


def shares(name: str, args: argparse.Namespace) -> dict[float, list[float]]:
    """By temperature, of each continuation."""
    loaded = load_checkpoint(CHECKPOINTS / name)
    config = EngineConfig(max_slots=32)
    engine = Engine(loaded.model, loaded.tokenizer, fingerprint="", config=config, executor=NativeExecutor)
    texts = [document.text for split in ("val", "test") for document in read_documents(BOOKS, split)]
    passages = [text[start : start + CHARACTERS] for start in range(0, args.places * STEP, STEP) for text in texts]
    prompts = [loaded.tokenizer.encode(passage)[: args.prompt_tokens] for passage in passages]
    found = {}
    for temperature in args.temperatures:
        for number, ids in enumerate(prompts):
            sampling = SamplingParams(
                max_tokens=args.tokens,
                temperature=temperature,
                seed=number,
                ignore_eos=True,
                top_p=args.top_p,
                repetition_penalty=args.repetition_penalty,
            )
            prompt = (loaded.tokenizer.end_of_text_id, *ids)
            engine.add(GenerationRequest(request_id=str(number), prompt_ids=prompt, sampling=sampling, keep_state=True))
        found[temperature] = []
        while engine.has_work:
            ends = [event.end_state for _, event in engine.step() if isinstance(event, Finished)]
            found[temperature] += [
                repeated_share(end.new_ids[args.prompt_tokens + 1 :]) for end in ends if end is not None
            ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["pulse-books", "pulse-books-keyed"], help="of the bundled ones")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.6, 0.8, 1.0])
    parser.add_argument("--places", type=int, default=4, help="passages of each book")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--repetition-penalty", type=float, default=1.0)
    args = parser.parse_args()
    columns = {name: shares(name, args) for name in args.models}
    print(f"| temperature | {' | '.join(columns)} |\n| --- |{' ---: |' * len(columns)}")
    for temperature in args.temperatures:
        cells = []
        for column in columns.values():
            values = column[temperature]
            loops = sum(value > LOOP_SHARE for value in values)
            cells.append(f"{sum(values) / len(values):.1%} ({loops} of {len(values)})")
        print(f"| {temperature} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
