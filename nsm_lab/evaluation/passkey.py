"""Passkey retrieval (Mohtashami and Jaggi 2023): a number hidden in a book, with a question at the end.

A base model trained on books may well not answer a question, so two things are measured: whether it writes the key
(greedy), and whether it finds the right key likelier than nine others (likelihood, chance 10 %).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from nsm_core.errors import ConfigError
from nsm_core.execution.base import SequenceModel
from nsm_core.state.spec import State
from nsm_core.tokenizer import Tokenizer
from nsm_lab.evaluation.history.key_tasks import NEEDLE, NUM_CHOICES, QUESTION
from nsm_lab.evaluation.losses import IntArray
from nsm_lab.evaluation.reading import EvaluatedModel, read_in_segments, reading, rows_that_fit

DEFAULT_LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
DEFAULT_DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
ANSWER = " {key}."
_SEGMENT_LEN = 2048

Item = TypeVar("Item")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PasskeyCell:
    """Prompts of `length` tokens with the key after the share `depth` of the text."""

    length: int
    depth: float
    num_examples: int
    num_written: int  # the greedy continuation begins with the key
    num_chosen: int  # the right key is the likeliest of the choices
    mean_rank: float  # of the right key among the choices, from 1
    mean_log_prob: float  # nats, of the right key and the full stop after it
    mean_margin: float  # nats, over the likeliest wrong key


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PasskeyResult:
    """One cell for each length and depth."""

    num_choices: int
    cells: tuple[PasskeyCell, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Example:
    prompt: IntArray  # [length]
    choices: tuple[str, ...]  # the right key first


def measure_passkey(
    model: EvaluatedModel,
    tokenizer: Tokenizer,
    filler: IntArray,
    *,
    lengths: Sequence[int] = DEFAULT_LENGTHS,
    depths: Sequence[float] = DEFAULT_DEPTHS,
    num_examples: int = 10,
    max_rows: int = 64,
    seed: int = 0,
    autocast: bool = False,
) -> PasskeyResult:
    """`num_examples` prompts for each length and depth, cut from the token ids `filler` [N] of books.

    `max_rows`: prompts side by side. Raises ConfigError when a length leaves no room for text around the key.
    """
    total = num_examples * len(depths) * sum(lengths)
    cells: list[PasskeyCell] = []
    with (
        tqdm(total=total, unit="token", unit_scale=True, desc="passkey", disable=None) as bar,
        reading(model, autocast=autocast) as device,
    ):
        for number, length in enumerate(lengths):
            rng = np.random.default_rng((seed, number))
            examples = [
                _make_example(tokenizer, filler, length, depth, rng) for depth in depths for _ in range(num_examples)
            ]
            scores: list[tuple[bool, Tensor]] = []
            for part in _batched(examples, rows_that_fit(model, max_rows)):
                scores.extend(_score(model, tokenizer, part, device))
                bar.update(length * len(part))
            by_depth = _batched(scores, num_examples)
            cells.extend(_summarise(length, depth, part) for depth, part in zip(depths, by_depth, strict=True))
    return PasskeyResult(num_choices=NUM_CHOICES, cells=tuple(cells))


def _batched(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _make_example(
    tokenizer: Tokenizer, filler: IntArray, length: int, depth: float, rng: np.random.Generator
) -> _Example:
    """A prompt of exactly `length` tokens: start of text, text, key, text, question."""
    choices = tuple(str(number) for number in rng.choice(90_000, NUM_CHOICES, replace=False) + 10_000)
    needle = tokenizer.encode(NEEDLE.format(key=choices[0]))
    question = tokenizer.encode(QUESTION)
    room = length - 1 - len(needle) - len(question)
    if room < 1:
        raise ConfigError(f"passkey lengths must be above {length - room} tokens, got {length}")
    start = rng.integers(max(1, len(filler) - room + 1))
    text = np.resize(filler[start:], room)  # a text that is too short begins again
    before = round(depth * room)
    parts = ([tokenizer.end_of_text_id], text[:before], needle, text[before:], question)
    return _Example(np.concatenate([np.asarray(part, np.int64) for part in parts]), choices)


def _score(
    model: SequenceModel, tokenizer: Tokenizer, examples: Sequence[_Example], device: torch.device
) -> list[tuple[bool, Tensor]]:
    """For each example whether the key was written, and the log-probabilities of its choices [C]."""
    ids = torch.from_numpy(np.stack([example.prompt for example in examples])).to(device)
    hidden, state = read_in_segments(model, ids, model.initial_state(len(examples)), _SEGMENT_LEN)
    log_probs = [
        _answer_log_probs(
            model, hidden, state, [tokenizer.encode(ANSWER.format(key=example.choices[choice])) for example in examples]
        )
        for choice in range(NUM_CHOICES)
    ]
    written = _greedy_answers(model, tokenizer, hidden, state)
    is_written = [
        text.startswith(ANSWER.format(key=example.choices[0])[:-1])
        for text, example in zip(written, examples, strict=True)
    ]
    return list(zip(is_written, torch.stack(log_probs, dim=1).cpu(), strict=True))


def _answer_log_probs(model: SequenceModel, hidden: Tensor, state: State, answers: list[list[int]]) -> Tensor:
    """Log-probability [B] of each row's answer after the prompt that `hidden` [B,d] and `state` come from."""
    lengths = torch.tensor([len(answer) for answer in answers], device=hidden.device)
    padded = list(itertools.zip_longest(*answers, fillvalue=0))
    ids = torch.tensor(padded, device=hidden.device).T
    later, _ = model.forward(ids, state, lengths)
    logits = model.logits(torch.cat((hidden[:, None], later[:, :-1]), dim=1))
    log_probs = torch.log_softmax(logits, dim=-1).gather(-1, ids[..., None])[..., 0]
    is_answer = torch.arange(ids.shape[1], device=hidden.device) < lengths[:, None]
    return torch.where(is_answer, log_probs, 0.0).sum(dim=1)


def _greedy_answers(model: SequenceModel, tokenizer: Tokenizer, hidden: Tensor, state: State) -> list[str]:
    """What each row writes next: enough tokens for a key however it is cut into tokens."""
    chosen: list[Tensor] = []
    for _ in range(len(ANSWER.format(key="00000"))):
        chosen.append(model.logits(hidden).argmax(dim=-1))
        hidden, state = model.step(chosen[-1], state)
    return [tokenizer.decode(row) for row in torch.stack(chosen, dim=1).tolist()]


def _summarise(length: int, depth: float, scores: Sequence[tuple[bool, Tensor]]) -> PasskeyCell:
    log_probs = torch.stack([row for _, row in scores])
    right, best_wrong = log_probs[:, 0], log_probs[:, 1:].amax(dim=1)
    ranks = 1 + (log_probs[:, 1:] >= right[:, None]).sum(dim=1)
    return PasskeyCell(
        length=length,
        depth=depth,
        num_examples=len(scores),
        num_written=sum(is_written for is_written, _ in scores),
        num_chosen=int((ranks == 1).sum()),
        mean_rank=float(ranks.double().mean()),
        mean_log_prob=float(right.double().mean()),
        mean_margin=float((right - best_wrong).double().mean()),
    )
