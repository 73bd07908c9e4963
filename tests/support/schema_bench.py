"""Samples schemas of JSONSchemaBench, or of any folder of schemas, and counts how the server treats them.

    python -m tests.support.schema_bench PATH --count 400 --seed 1

A file is one schema, or `{"schema": …, "tests": [{"data": …, "valid": true}, …]}`. For each sampled file: whether the
schema is taken, refused or stops the compiler; whether its valid instances are taken and its invalid ones refused; and
whether answers that a random model writes within it are valid. Beside them stands the library alone, with its defaults.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
from llguidance import LLMatcher

from nsm_core.engine.request import FinishReason, GenerationRequest
from nsm_core.errors import InvalidRequest
from nsm_core.grammars.compiler import GrammarCompiler
from nsm_core.grammars.grammar import Grammar, json_schema_grammar
from nsm_core.sampling.params import SamplingParams
from nsm_core.tokenizer import BpeTokenizer, Tokenizer
from tests.nsm_core.engine.harness import make_engine, run_all
from tests.support.models import RandomModel

ANSWER_TOKENS = 400
COUNTS = (
    *("schemas", "taken", "refused", "taken by the library alone"),
    *("valid instances", "valid instances taken", "invalid instances", "invalid instances refused"),
    *("answers", "answers that ended", "answers that ended and are valid"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One file. `tests`: (instance, whether it is valid)."""

    name: str
    schema: dict[str, Any]
    tests: tuple[tuple[Any, bool], ...] = ()


def sample(folder: Path, *, count: int, seed: int) -> Iterator[Sample]:
    """`count` files chosen by `seed`, or all if there are fewer; files that hold no schema are passed over."""
    paths = sorted(folder.rglob("*.json"))
    chosen = paths if len(paths) <= count else random.Random(seed).sample(paths, count)
    for path in chosen:
        read = json.loads(path.read_text("utf-8"))
        name = path.relative_to(folder).as_posix()
        if isinstance(read, dict) and isinstance(read.get("schema"), dict):
            tests = tuple((test["data"], bool(test["valid"])) for test in read.get("tests", ()))
            yield Sample(name, read["schema"], tests)
        elif isinstance(read, dict):
            yield Sample(name, read)


class Bench:
    """`counts`: by the names of COUNTS; `reasons`: of refusals, each with its number."""

    def __init__(self, tokenizer: Tokenizer, *, num_answers: int) -> None:
        self.counts: collections.Counter[str] = collections.Counter(dict.fromkeys(COUNTS, 0))
        self.reasons: collections.Counter[str] = collections.Counter()
        self.odd: list[str] = []
        self._tokenizer = tokenizer
        self._num_answers = num_answers
        self._compiler = GrammarCompiler(tokenizer)
        self._model = RandomModel(tokenizer.vocab_size)

    def add(self, one: Sample) -> None:
        self.counts["schemas"] += 1
        self.counts["taken by the library alone"] += self._is_taken_alone(one)
        grammar = json_schema_grammar(one.schema, param="schema")
        try:
            self._compiler.trial.check(grammar)
            self._compiler.matcher(grammar)
        except InvalidRequest as error:
            self.counts["refused"] += 1
            self.reasons[str(error)] += 1
            return
        self.counts["taken"] += 1
        for instance, is_valid in one.tests:
            self._add_instance(one, grammar, instance, is_valid)
        if self._num_answers:
            self._add_answers(one, grammar)

    def _is_taken_alone(self, one: Sample) -> bool:
        # without a vocabulary of its own: the library's check of a schema, as its users call it
        source = LLMatcher.grammar_from_json_schema(one.schema)
        return not LLMatcher.validate_grammar(source)

    def _add_instance(self, one: Sample, grammar: Grammar, instance: Any, is_valid: bool) -> None:
        is_taken = self._takes(grammar, json.dumps(instance, ensure_ascii=False))
        kind = "valid" if is_valid else "invalid"
        self.counts[f"{kind} instances"] += 1
        is_right = is_taken == is_valid
        self.counts[f"{kind} instances {'taken' if is_valid else 'refused'}"] += is_right
        if not is_right:
            self.odd.append(f"{one.name}: a {kind} instance was {'taken' if is_taken else 'refused'}")

    def _takes(self, grammar: Grammar, text: str) -> bool:
        matcher = self._compiler.matcher(grammar)
        ids = self._tokenizer.encode(text)
        if matcher.num_valid(ids) < len(ids):
            return False
        for token_id in ids:
            matcher.advance(token_id)
        return bool(matcher.is_complete or matcher.inner.is_accepting())

    def _add_answers(self, one: Sample, grammar: Grammar) -> None:
        requests = [
            GenerationRequest(
                request_id=str(seed),
                prompt_ids=(self._tokenizer.end_of_text_id,),
                sampling=SamplingParams(max_tokens=ANSWER_TOKENS, temperature=1.0, seed=seed, grammar=grammar),
            )
            for seed in range(self._num_answers)
        ]
        for outcome in run_all(make_engine(self._model, self._tokenizer), requests).values():
            self.counts["answers"] += 1
            if outcome.finished.reason is not FinishReason.STOP:
                continue
            self.counts["answers that ended"] += 1
            try:
                jsonschema.validate(json.loads(outcome.text), one.schema)
            except (ValueError, jsonschema.ValidationError) as error:
                self.odd.append(f"{one.name}: an answer is not valid: {str(error).splitlines()[0]}")
            else:
                self.counts["answers that ended and are valid"] += 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--answers", type=int, default=1, help="of a random model, for each schema")
    parser.add_argument("--model", type=Path, help="whose tokenizer is used (default: the bundled model)")
    options = parser.parse_args(arguments)
    bench = Bench(_tokenizer(options.model), num_answers=options.answers)
    for one in sample(options.path, count=options.count, seed=options.seed):
        bench.add(one)
    sys.stdout.writelines(f"{bench.counts[name]:7}  {name}\n" for name in COUNTS)
    sys.stderr.writelines(f"{number:7}  {reason}\n" for reason, number in bench.reasons.most_common(20))
    sys.stderr.writelines(f"{line}\n" for line in bench.odd)
    return 0


def _tokenizer(model: Path | None) -> Tokenizer:
    from nsm_core.architectures import identify
    from nsm_core.model.bundled import find_checkpoint

    return identify(find_checkpoint(model))[1] if model is not None else BpeTokenizer.load(find_checkpoint(None))


if __name__ == "__main__":
    sys.exit(main())
