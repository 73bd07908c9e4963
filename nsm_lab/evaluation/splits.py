"""Split invariance: the same text read whole, in chunks of any size, and token by token."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor
from tqdm import tqdm

from nsm_core.execution.base import SequenceModel
from nsm_core.state.spec import POSITION, State
from nsm_lab.evaluation.reading import EvaluatedModel, reading

# The longest piece of a random split, in tokens.
_MAX_PIECE = 200


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SplitDifference:
    """One way to read the text, against reading it whole: the largest absolute differences."""

    split: str
    num_pieces: int
    logits: float
    state: float
    is_same_continuation: bool  # greedy, token for token


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SplitResult:
    """`max_logit` and `max_state`: the largest absolute values of the whole run, to read the differences by."""

    num_tokens: int
    continuation_len: int
    max_logit: float
    max_state: float
    splits: tuple[SplitDifference, ...]


def measure_splits(
    model: EvaluatedModel, ids: Tensor, *, num_random: int = 3, continuation_len: int = 64, seed: int = 0
) -> SplitResult:
    """Reads `ids` [T] int64 in fp32: whole, `num_random` times in random pieces, and token by token."""
    with reading(model) as device:
        ids = ids.to(device)
        whole = _read_pieces(model, ids, [len(ids)])
        want = _continue(model, whole, continuation_len)
        differences = []
        for name, lengths in tqdm(list(_splits(len(ids), num_random, seed)), unit="split", desc="split", disable=None):
            got = _read_pieces(model, ids, lengths)
            differences.append(
                SplitDifference(
                    split=name,
                    num_pieces=len(lengths),
                    logits=_largest(got[0] - whole[0]),
                    state=max(_largest(got[1][part] - whole[1][part]) for part in _floats(whole[1])),
                    is_same_continuation=torch.equal(_continue(model, got, continuation_len), want),
                )
            )
        return SplitResult(
            num_tokens=len(ids),
            continuation_len=continuation_len,
            max_logit=_largest(whole[0]),
            max_state=max(_largest(whole[1][part]) for part in _floats(whole[1])),
            splits=tuple(differences),
        )


def _splits(num_tokens: int, num_random: int, seed: int) -> Iterator[tuple[str, list[int]]]:
    generator = torch.Generator().manual_seed(seed)
    longest = max(1, min(_MAX_PIECE, num_tokens // 4))
    for number in range(num_random):
        lengths: list[int] = []
        while (rest := num_tokens - sum(lengths)) > 0:
            lengths.append(min(rest, int(torch.randint(1, longest + 1, (), generator=generator))))
        yield f"random {number + 1}", lengths
    yield "token by token", [1] * num_tokens


def _read_pieces(model: SequenceModel, ids: Tensor, lengths: list[int]) -> tuple[Tensor, State]:
    """Logits [T, V] of every position and the final state; a piece of one token takes the decode path."""
    state, logits = model.initial_state(1), list[Tensor]()
    for piece in torch.split(ids, lengths):
        if len(piece) == 1:
            hidden, state = model.step(piece, state)
        else:
            hidden, state = model.forward(piece[None], state)
            hidden = hidden[0]
        logits.append(model.logits(hidden))
    return torch.cat(logits), state


def _continue(model: SequenceModel, read: tuple[Tensor, State], num_tokens: int) -> Tensor:
    """The greedy continuation [num_tokens]."""
    logits, state = read
    chosen = [logits[-1:].argmax(dim=-1)]
    while len(chosen) < num_tokens:
        hidden, state = model.step(chosen[-1], state)
        chosen.append(model.logits(hidden).argmax(dim=-1))
    return torch.cat(chosen)


def _floats(state: State) -> list[str]:
    return [name for name in state if name != POSITION]


def _largest(values: Tensor) -> float:
    return float(values.abs().max())
