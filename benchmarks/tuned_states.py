"""Tuned states beside the plain prompt, states that have read the examples, and LoRA, on three tasks:
`python -m benchmarks.tuned_states --data DIR --help`.

Tasks: where a person is (bAbI 1), whether a review is good (IMDB), and short sums of digits (ListOps). All of a task
get the same examples to learn from and to choose by, and are measured on others: the loss of completion and end of
text, and how often the right label is the likeliest of all labels.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import itertools
import json
import random
import tarfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import zstandard
from torch import Tensor

from nsm_core.architectures import load_model
from nsm_core.chat_template import get_template
from nsm_core.loaded_model import LoadedModel, SequenceModel
from nsm_core.rwkv7.chunked_scan import state_scan_chunked
from nsm_core.rwkv7.model import Rwkv7Model
from nsm_core.state.spec import State
from nsm_core.tuning.config import TuneConfig
from nsm_core.tuning.examples import Example, ExampleLimits, ExampleReader
from nsm_core.tuning.loss import mean_loss, rows_of, split_by_tokens
from nsm_core.tuning.start import after_start_token, for_rows
from nsm_core.tuning.tuner import Tuner
from nsm_lab.evaluation.tasks.babi import read_questions
from nsm_lab.training.lora import train_lora

REVIEW_CHARS = 600  # of a review's end
LISTOPS_TOKENS = 20  # longest expression, parentheses left out
LIMITS = ExampleLimits(max_tokens=1024, max_examples=100_000)


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    prompt: str
    label: str  # with the space before it


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    name: str
    labels: tuple[str, ...]
    train: list[Item]
    held_out: list[Item]
    test: list[Item]


def _unpacked(path: Path) -> bytes:
    with path.open("rb") as file:
        return zstandard.ZstdDecompressor().stream_reader(file).read()


def babi_items(data: Path) -> Iterator[Item]:
    """Questions of task 1 of the larger set, in the file's order."""
    raw = io.BytesIO(_unpacked(data / "babi" / "babi-tasks-v1-2-en-10k.tar.zst"))
    with tarfile.open(fileobj=raw) as archive:
        name = next(one for one in archive.getnames() if "/qa1_" in one and one.endswith("_train.txt"))
        member = archive.extractfile(name)
        text = "" if member is None else member.read().decode()
    for one in read_questions(text):
        yield Item("\n".join([*one.story, f"Question: {one.question}", "Answer:"]), f" {one.answer}")


def imdb_items(data: Path) -> Iterator[Item]:
    for line in _unpacked(data / "imdb" / "imdb-train.jsonl.zst").decode().split("\n"):
        if line:
            row = json.loads(line)
            end = row["text"].replace("<br />", " ")[-REVIEW_CHARS:].partition(" ")[2]
            yield Item(f"Review: {end}\nThe film is", " good" if row["label"] else " bad")


def listops_items(data: Path) -> Iterator[Item]:
    for line in _unpacked(data / "listops" / "nyu-listops-test_d20s.tsv.zst").decode().splitlines():
        answer, _, text = line.partition("\t")
        tokens = [token for token in text.split() if token not in "()"]
        if len(tokens) <= LISTOPS_TOKENS:
            yield Item(f"{' '.join(tokens)} =", f" {answer}")


WAYS = ("plain", "read", "tuned", "tuned-read", "lora")
SOURCES = {"babi-1": babi_items, "imdb": imdb_items, "listops": listops_items}


def read_task(name: str, data: Path, sizes: Sequence[int]) -> Task:
    """Drawn with one seed; no prompt is in two parts."""
    items = list({item.prompt: item for item in SOURCES[name](data)}.values())
    random.Random(24).shuffle(items)
    bounds = [sum(sizes[:count]) for count in range(4)]
    parts = [items[first:last] for first, last in itertools.pairwise(bounds)]
    return Task(name, tuple(sorted({item.label for item in items})), *parts)


class Measured:
    """A model with what is measured of it."""

    def __init__(self, loaded: LoadedModel[SequenceModel], max_tokens: int) -> None:
        self.loaded, self.model, self.max_tokens = loaded, loaded.model, max_tokens
        if isinstance(loaded.model, Rwkv7Model):
            loaded.model.scan = state_scan_chunked
        self.reader = ExampleReader(loaded.tokenizer, get_template(loaded.chat_template), LIMITS)

    def examples(self, items: Sequence[Item]) -> list[Example]:
        lines = [json.dumps({"prompt": item.prompt, "completion": item.label}) for item in items]
        return self.reader.read("\n".join(lines).encode())

    def loss(self, state: State, examples: Sequence[Example]) -> float:
        return mean_loss(self.model, state, examples, device=self.loaded.device, max_tokens=self.max_tokens)

    @torch.no_grad()
    def accuracy(self, state: State, task: Task, items: Sequence[Item]) -> float:
        """How often the right label is the likeliest of all."""
        labels, num_right = [self.loaded.tokenizer.encode(label) for label in task.labels], 0
        for group in split_by_tokens(self.examples(items), self.max_tokens):
            prompts = [dataclasses.replace(one, ids=one.ids[: one.targets[0]], targets=()) for one in group]
            rows = rows_of(prompts, self.loaded.device)
            hidden, after = self.model.forward(rows.ids, for_rows(state, len(group)), rows.lengths)
            first = self.model.logits(hidden[torch.arange(len(group)), rows.lengths - 1]).log_softmax(dim=-1)
            scores = [self._score(ids, first, after) for ids in labels]
            chosen = torch.stack(scores, dim=-1).argmax(dim=-1).tolist()
            right = [task.labels.index(items[one.line - 1].label) for one in group]
            num_right += sum(one == other for one, other in zip(chosen, right, strict=True))
        return num_right / len(items)

    def _score(self, label: Sequence[int], first: Tensor, after: State) -> Tensor:
        """The log-likelihood [B] of a label. first [B,V]: of its first token; after: the states of its prompts."""
        score = first[:, label[0]]
        if len(label) == 1:
            return score
        ids = torch.tensor([label], device=first.device).expand(len(first), -1)
        hidden, _ = self.model.forward(ids[:, :-1], after)
        rest = self.model.logits(hidden).log_softmax(dim=-1)
        return score + rest.gather(-1, ids[:, 1:, None]).sum(dim=(1, 2))

    @torch.no_grad()
    def after_reading(self, items: Sequence[Item]) -> State:
        """The state of a text of examples with blank lines between them."""
        text = "".join(f"{item.prompt}{item.label}\n\n" for item in items)
        ids = [self.loaded.tokenizer.end_of_text_id, *self.loaded.tokenizer.encode(text)]
        _, state = self.model.forward(torch.tensor([ids], device=self.loaded.device), self.model.initial_state(1))
        return state


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """One task for one model, with what all ways learn from and choose by."""

    args: argparse.Namespace
    measured: Measured
    task: Task
    train: list[Example]
    held_out: list[Example]

    def row(self, way: str, state: State, began: float, *, of: Measured | None = None, **facts: Any) -> dict[str, Any]:
        """`of`: a model that was changed. `began`: when the way's work began, by `time.monotonic()`."""
        measured, seconds = of or self.measured, time.monotonic() - began
        return {
            "model": measured.loaded.name,
            "task": self.task.name,
            "way": way,
            "loss": measured.loss(state, measured.examples(self.task.test)),
            "accuracy": measured.accuracy(state, self.task, self.task.test),
            "seconds": seconds,
            **facts,
        }

    def plain(self) -> dict[str, Any]:
        num_tokens = sum(len(example.ids) for example in self.train)
        return self.row("plain prompt", after_start_token(self.measured.loaded), time.monotonic(), tokens=num_tokens)

    def read(self) -> tuple[State, dict[str, Any]]:
        """The number of examples is that of the most right answers on those held out."""
        began, measured, task = time.monotonic(), self.measured, self.task
        states = {count: measured.after_reading(task.train[:count]) for count in self.args.read}
        right = {count: measured.accuracy(state, task, task.held_out) for count, state in states.items()}
        count = max(right, key=lambda one: right[one])
        return states[count], self.row("examples read", states[count], began, examples=count)

    def tuned(self, way: str, start: State | None) -> dict[str, Any]:
        """With the rate of the lowest held-out loss."""
        began, found = time.monotonic(), []
        for rate in self.args.rates:
            config = config_of(self.args, rate)
            tuner = Tuner(self.measured.loaded, config, self.train, self.held_out, start=start)
            last = list(tuner.run())[-1]
            found.append((last.best_loss, rate, last.best_step, tuner.best_state(), tuner.num_parameters))
        _, rate, steps, state, numbers = min(found, key=lambda one: one[:2])
        losses = {one[1]: one[0] for one in found}
        return self.row(way, state, began, rate=rate, steps=steps, numbers=numbers, held_out_losses=losses)

    def lora(self) -> dict[str, Any]:
        """The same with adapters, each time of a model that was read again."""
        began, found = time.monotonic(), []
        for rate in self.args.lora_rates:
            changed = fresh(self.args)
            config = config_of(self.args, rate)
            lora, loss = train_lora(changed.loaded, config, self.train, self.held_out, rank=self.args.rank)
            found.append((loss, rate, changed, lora.num_parameters))
        _, rate, changed, numbers = min(found, key=lambda one: one[:2])
        losses = {one[1]: one[0] for one in found}
        state = after_start_token(changed.loaded)
        return self.row("LoRA", state, began, of=changed, rate=rate, numbers=numbers, held_out_losses=losses)


def measure(args: argparse.Namespace, name: str) -> Iterator[dict[str, Any]]:
    task, measured = read_task(name, args.data, args.sizes), fresh(args)
    trial = Trial(args, measured, task, measured.examples(task.train), measured.examples(task.held_out))
    if "plain" in args.ways:
        yield trial.plain()
    if "tuned" in args.ways:
        yield trial.tuned("tuned state", None)
    if "read" in args.ways or "tuned-read" in args.ways:
        state, row = trial.read()
        yield row
        if "tuned-read" in args.ways:
            yield trial.tuned("tuned from the examples read", state)
    if "lora" in args.ways:
        yield trial.lora()


def fresh(args: argparse.Namespace) -> Measured:
    """The model, read anew."""
    return Measured(load_model(args.model, args.device), args.max_tokens)


def config_of(args: argparse.Namespace, rate: float) -> TuneConfig:
    return TuneConfig(
        num_epochs=args.epochs,
        batch_size=args.batch,
        rate=rate,
        seed=args.seed,
        patience=args.patience,
        max_tokens_at_once=args.max_tokens,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="directory with babi, imdb and listops")
    parser.add_argument("--model", type=Path, help="as of nsm serve (default: the bundled model)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tasks", nargs="+", choices=sorted(SOURCES), default=sorted(SOURCES))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="tuned-read begins at the examples read")
    parser.add_argument("--sizes", nargs=3, type=int, default=(500, 100, 500), metavar=("TRAIN", "HELD", "TEST"))
    parser.add_argument(
        "--read", nargs="+", type=int, default=[4, 16, 64, 256], help="examples; the best number is taken"
    )
    parser.add_argument("--rates", nargs="+", type=float, default=[0.1], help="of tuned states; the best is taken")
    parser.add_argument("--lora-rates", nargs="+", type=float, default=[0.001])
    parser.add_argument("--rank", type=int, default=8, help="of LoRA")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--patience", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=4096, help="of a forward and backward pass")
    parser.add_argument("--output", type=Path, help="a file that gets a line of JSON for each row")
    args = parser.parse_args()
    print(f"{'task':10} {'way':30} {'loss':>8} {'right':>7} {'s':>7}  facts")
    for name in args.tasks:
        for row in measure(args, name):
            rest = {key: value for key, value in row.items() if key in ("rate", "steps", "examples", "numbers")}
            figures = f"{row['loss']:8.4f} {row['accuracy']:7.1%} {row['seconds']:7.1f}"
            print(f"{row['task']:10} {row['way']:30} {figures}  {json.dumps(rest)}", flush=True)
            if args.output is not None:
                with args.output.open("a") as file:
                    print(json.dumps({**row, "device": args.device, "sizes": list(args.sizes)}), file=file)


if __name__ == "__main__":
    main()
