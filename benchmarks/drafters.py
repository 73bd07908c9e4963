"""Which drafts of tokens pay at batch 1 on a CPU: `python -m benchmarks.drafters`. Tables, then one line of JSON.

Drafts of the next tokens come from the small bundled model, which has the same tokenizer, or from the text itself (what
followed the last few tokens when they occurred before). The native executor reads drafts in one chunk, which gives the
bits that single steps would have given; where one is refused, the state is put back and what was accepted is read with
the next chunk. So the tokens are those of plain decoding, which every run checks. All figures are of CPU time, plain
decoding and drafts by turns on the same prompts: the openings of pieces of the test books.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.cpu_time import cpu_times
from nsm_core.execution.native.draw import draw_tokens
from nsm_core.execution.native.executor import NativeExecutor
from nsm_core.model.bundled import CHECKPOINTS
from nsm_core.model.loader import load_checkpoint
from nsm_core.sampling.params import SamplingParams
from nsm_core.sampling.sampler import SamplingRow
from nsm_lab.provenance import source_commit
from nsm_lab.training.data_files import read_documents

Logits = npt.NDArray[np.float32]
MAX_UNREAD = 8  # accepted tokens that wait for the next chunk; more are read without drafts
MAX_GRAM = 3  # tokens that must have occurred before


class Chooser:
    """Tokens from logits, as the sampler does it: greedy at temperature 0, else drawn by position."""

    def __init__(self, temperature: float) -> None:
        self._params = SamplingParams(temperature=temperature, seed=1)

    def __call__(self, logits: Logits, position: int) -> list[int]:
        """logits [n, V]; the first row's token comes at `position`."""
        if self._params.is_greedy:
            return [int(token_id) for token_id in logits.argmax(axis=-1)]
        rows = [
            SamplingRow(params=self._params, position=position + index, generated_counts={})
            for index in range(len(logits))
        ]
        return [int(token_id) for token_id in draw_tokens(logits, range(len(logits)), rows)]


class Row:
    """A text on row 0 of an executor, whose state has read its first `num_read` tokens."""

    def __init__(self, executor: NativeExecutor) -> None:
        self._executor = executor
        self._tensors = executor.pool.tensors
        executor.pool.lease(0)
        self.num_read = 0
        self._saved: list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]] = []
        self._num_saved = 0

    def begin(self, prompt: Sequence[int]) -> None:
        self._executor.pool.write(0, self._executor.initial)
        self._executor.read((0,), (prompt[:-1],))
        self.num_read = len(prompt) - 1

    def read(self, text: Sequence[int], drafts: Sequence[int] = ()) -> Logits:
        """Logits [1 + len(drafts), V] after the text, and after each draft. All of them count as read."""
        ids = [*text[self.num_read :], *drafts]
        if drafts:
            self.save(len(ids))
        self.num_read += len(ids)
        if len(ids) == 1:
            hidden = self._executor.step((0,), ids)
        else:
            hidden = self._executor.read((0,), (ids,))[0][-1 - len(drafts) :]
        return self._executor.logits(hidden).numpy()

    def keep(self, num_tokens: int) -> None:
        """The state goes back to the saved one if it has read more than the text's `num_tokens`."""
        if self.num_read > num_tokens:
            self._restore()

    def save(self, num_tokens: int) -> None:
        """What the next `num_tokens` change: slots, tails and positions, and their places in the rings."""
        self._num_saved, self._saved = self.num_read, []
        for name, tensor in self._tensors.items():
            if name.endswith(".kv"):
                positions = torch.arange(self.num_read, self.num_read + num_tokens) % tensor.shape[3]
                self._saved.append((tensor, positions, tensor[0].index_select(2, positions)))
            else:
                self._saved.append((tensor, None, tensor[0].clone()))

    def _restore(self) -> None:
        self.num_read = self._num_saved
        for tensor, positions, row in self._saved:
            if positions is None:
                tensor[0] = row
            else:
                tensor[0].index_copy_(2, positions, row)


class Drafter(Protocol):
    """Guesses what comes next."""

    def begin(self, prompt: Sequence[int], choose: Chooser) -> None: ...

    def propose(self, text: Sequence[int], most: int) -> list[int]: ...

    def keep(self, num_tokens: int) -> None:
        """So many tokens of the text and the drafts are text now."""
        ...


class SmallModel:
    """Its own most likely tokens, or those that the same draws give."""

    def __init__(self, executor: NativeExecutor) -> None:
        self._row = Row(executor)

    def begin(self, prompt: Sequence[int], choose: Chooser) -> None:
        self._row.begin(prompt)
        self._choose = choose

    def propose(self, text: Sequence[int], most: int) -> list[int]:
        grown = list(text)
        logits = self._row.read(grown)
        self._row.save(most)
        while True:
            grown += self._choose(logits, len(grown))
            if len(grown) == len(text) + most:
                return grown[len(text) :]
            logits = self._row.read(grown)

    def keep(self, num_tokens: int) -> None:
        self._row.keep(num_tokens)


class Lookup:
    """What followed the longest end of the text, of up to MAX_GRAM tokens, when it last occurred."""

    def begin(self, prompt: Sequence[int], choose: Chooser) -> None:
        self._last: dict[tuple[int, ...], int] = {}
        self._num_seen = 0

    def propose(self, text: Sequence[int], most: int) -> list[int]:
        for end in range(self._num_seen + 1, len(text)):  # where a gram ends that something follows
            for length in range(1, min(MAX_GRAM, end) + 1):
                self._last[tuple(text[end - length : end])] = end
        self._num_seen = len(text) - 1
        for length in range(MAX_GRAM, 0, -1):
            position = self._last.get(tuple(text[-length:]))
            if position is not None:
                return list(text[position : position + most])
        return []

    def keep(self, num_tokens: int) -> None:
        pass


@dataclasses.dataclass(slots=True)
class Tally:
    """Of all prompts of one way to decode."""

    seconds: float = 0.0
    tokens: int = 0
    rounds: int = 0
    proposed: int = 0
    accepted: int = 0

    def figures(self, plain: Tally) -> dict[str, float]:
        rate, plain_rate = self.tokens / self.seconds, plain.tokens / plain.seconds
        return {
            "accepted": self.accepted / max(1, self.proposed),
            "tokens_per_round": self.tokens / self.rounds,
            "tokens_per_cpu_s": rate,
            "plain_tokens_per_cpu_s": plain_rate,
            "ratio": rate / plain_rate,
        }


def decode(
    row: Row, drafter: Drafter | None, prompt: Sequence[int], num_tokens: int, most: int, choose: Chooser, tally: Tally
) -> list[int]:
    """The text after the prompt. Reading the prompt is not counted."""
    row.begin(prompt)
    text = list(prompt)
    if drafter is not None:
        drafter.begin(prompt, choose)
    started = time.process_time()
    while len(text) < len(prompt) + num_tokens:
        is_behind = len(text) - row.num_read > MAX_UNREAD
        drafts = [] if drafter is None or is_behind else drafter.propose(text, most)
        chosen = choose(row.read(text, drafts), len(text))
        num_accepted = next((i for i, draft in enumerate(drafts) if draft != chosen[i]), len(drafts))
        row.keep(len(text) + num_accepted)
        if drafter is not None:
            drafter.keep(len(text) + num_accepted)
        text += chosen[: num_accepted + 1]
        tally.rounds += 1
        tally.proposed += len(drafts)
        tally.accepted += num_accepted
    tally.seconds += time.process_time() - started
    tally.tokens += len(text) - len(prompt)
    return text[len(prompt) : len(prompt) + num_tokens]


def compare(
    row: Row, drafter: Drafter, prompts: list[list[int]], *, num_tokens: int, most: int, temperature: float
) -> dict[str, float]:
    """Raises RuntimeError where drafts change a text."""
    plain, drafted, choose = Tally(), Tally(), Chooser(temperature)
    for prompt in prompts:
        want = decode(row, None, prompt, num_tokens, 0, choose, plain)
        if decode(row, drafter, prompt, num_tokens, most, choose, drafted) != want:
            raise RuntimeError("drafts have changed a text")
    return drafted.figures(plain)


def cpu_ms(work: Callable[[], object], repeats: int) -> float:
    """The median."""
    return 1e3 * float(np.median(cpu_times(work, repeats)))


def measure_chunks(row: Row, prompt: list[int], repeats: int) -> dict[str, float]:
    """CPU milliseconds to read so many tokens with the logits after each, and to keep and put back a state."""
    row.begin(prompt)
    costs = {}
    for num_tokens in (1, 2, 3, 4, 5, 7, 9):

        def read(drafts: list[int] = prompt[: num_tokens - 1]) -> None:
            row.num_read = len(prompt) - 1
            row.read(prompt, drafts)

        costs[str(num_tokens)] = cpu_ms(read, repeats)
    costs["save"] = cpu_ms(lambda: row.save(5), repeats)
    costs["restore"] = cpu_ms(lambda: row.keep(-1), repeats)
    return costs


def read_prompts(encode: Callable[[str], list[int]], number: int, length: int) -> list[list[int]]:
    """Openings of pieces of equal length of the test books, by turns."""
    books = [encode(document.text) for document in read_documents(Path("data/books-sample"), "test")]
    stride = max(length, sum(map(len, books)) // number)
    starts = [(book, start) for book in books for start in range(0, len(book) - length, stride)]
    return [book[start : start + length] for book, start in starts[:number]]


def make_executor(name: str) -> tuple[NativeExecutor, Callable[[str], list[int]]]:
    loaded = load_checkpoint(CHECKPOINTS / name)
    return NativeExecutor(loaded.model, num_rows=1), loaded.tokenizer.encode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128, help="to decode after each")
    parser.add_argument("--drafts", type=int, nargs="+", default=[2, 3, 4, 8], help="at a time")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--repeats", type=int, default=25)
    args = parser.parse_args()
    torch.set_num_threads(1)
    executor, encode = make_executor("pulse-books")
    row = Row(executor)
    prompts = read_prompts(encode, args.prompts, args.prompt_tokens)
    drafters: dict[str, Drafter] = {
        "small model": SmallModel(make_executor("pulse-books-small")[0]),
        "lookup": Lookup(),
    }
    chunks = measure_chunks(row, prompts[0], args.repeats)
    print("CPU ms, tokens of a chunk with all logits: " + ", ".join(f"{name} {ms:.2f}" for name, ms in chunks.items()))
    print(
        f"{'drafts':<14}{'at a time':>10}{'temperature':>13}{'accepted':>10}{'a round':>9}{'tok/cpu-s':>11}{'plain':>7}"
    )
    runs = []
    for name, drafter in drafters.items():
        for temperature in args.temperatures:
            for most in args.drafts:
                run = compare(row, drafter, prompts, num_tokens=args.tokens, most=most, temperature=temperature)
                runs.append({"drafts": name, "most": most, "temperature": temperature, **run})
                print(
                    f"{name:<14}{most:>10}{temperature:>13}{run['accepted']:>10.1%}{run['tokens_per_round']:>9.2f}"
                    f"{run['tokens_per_cpu_s']:>11.0f}{run['plain_tokens_per_cpu_s']:>7.0f}{run['ratio']:>7.2f}x"
                )
    print(json.dumps({"commit": source_commit(), "chunk_ms": chunks, "num_prompts": len(prompts), "runs": runs}))


if __name__ == "__main__":
    main()
