"""Why a passage that was read long ago is lost: `python -m benchmarks.quality.far_memory --data books`.

A passage is read, then a book's other text, then the passage again. Between the two the slots of the heads that are
made to keep are changed by hand, which tells apart what could be at fault:

- `as read`: nothing is changed.
- `no later writes`: their slots are put back to what they were right after the passage. What is gained then is what
  was written at all; the rest was lost to the text in between.
- `n times as strong`: what the passage added to the slots, as far as it is left there, counts n times. The later
  writes stay. What is gained then is what a stronger write of the passage, alone, would bring.

And a key: stated once, asked for later. By its digits, how many of all tokens the model holds likelier than the right
one, with the right ones before it given.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nsm_core.model.keyed import KeyedMixer
from nsm_core.model.loader import LoadedNsm, load_checkpoint
from nsm_core.model.nsm import NsmModel
from nsm_core.model.segments import Segments
from nsm_core.state.spec import State
from nsm_lab.evaluation.history.estimates import Estimate, mean_estimate
from nsm_lab.evaluation.history.key_tasks import KeyTask, make_key_tasks
from nsm_lab.evaluation.history.rows import read
from nsm_lab.evaluation.markdown import table
from nsm_lab.evaluation.reading import reading, sequence_losses
from nsm_lab.provenance import command_line, source_commit
from nsm_lab.training.data_files import read_documents
from nsm_lab.training.keeping import keeping_numbers

Hook = Callable[[KeyedMixer, tuple[Tensor, State, Segments]], None]

LEAD = 256  # tokens of the book before the passage
PASSAGE = 256
FACTORS = (2, 4, 8, 16)


@dataclasses.dataclass(frozen=True, slots=True)
class KeepingHead:
    """One of them: its layer, its number there, and the bias of its strength as a share of a token."""

    layer: int
    number: int
    strength: float


def keeping_heads(model: NsmModel) -> list[KeepingHead]:
    """Heads whose decay looks at no token."""
    heads = []
    for layer, block in enumerate(model.layers):
        mixer = block.mixer
        if isinstance(mixer, KeyedMixer):
            for number in sorted(keeping_numbers(mixer).tolist()):
                heads.append(KeepingHead(layer, number, float(torch.sigmoid(mixer.rates.bias[number]))))
    return heads


def slots_of(state: State, head: KeepingHead) -> Tensor:
    """[B, M, V]."""
    return state[f"layers.{head.layer}.slots"][:, head.number]


def changed(state: State, heads: Sequence[KeepingHead], slots: Mapping[KeepingHead, Tensor]) -> State:
    """A copy of `state` with other slots in some heads."""
    copy = dict(state)
    for head in heads:
        name = f"layers.{head.layer}.slots"
        copy[name] = copy[name].clone() if copy[name] is state[name] else copy[name]
        copy[name][:, head.number] = slots[head]
    return copy


@dataclasses.dataclass(frozen=True, slots=True)
class Passages:
    """Rows of a book: `before` and `after` a passage of it, and two passages [B, PASSAGE] that are not among them."""

    before: Tensor
    after: Tensor
    read: Tensor
    other: Tensor


def cut(texts: Sequence[Sequence[int]], farthest: int) -> Passages:
    """Of each text the first tokens. Raises ValueError for one that is too short."""
    lengths = (LEAD, PASSAGE, PASSAGE, farthest - PASSAGE)
    if min(map(len, texts)) < sum(lengths):
        raise ValueError(f"every text must have {sum(lengths)} tokens")
    rows = torch.tensor([list(text[: sum(lengths)]) for text in texts])
    before, passage, other, after = torch.split(rows, lengths, dim=1)
    return Passages(before, after, passage, other)


def passage_gains(
    model: NsmModel, passages: Passages, distances: Sequence[int]
) -> tuple[dict[tuple[str, int], Estimate], dict[tuple[KeepingHead, int], float]]:
    """Nats a token by what was changed and by distance; by head and distance, the share of what the passage added to
    the head's slots that is left, by its norm."""
    heads = keeping_heads(model)
    start = read(model, passages.before, model.initial_state(len(passages.before)))
    seen, unseen = read(model, passages.read, start), read(model, passages.other, start)
    after_passage = {head: slots_of(seen, head).clone() for head in heads}
    added = {head: (slots_of(seen, head) - slots_of(unseen, head)).norm() for head in heads}
    gains, left, position = dict[tuple[str, int], Estimate](), dict[tuple[KeepingHead, int], float](), 0
    for distance in sorted(distances):
        end = distance - PASSAGE
        text = passages.after[:, position:end]
        seen, unseen, position = read(model, text, seen), read(model, text, unseen), end
        last = passages.after[:, end - 1 : end] if end else passages.read[:, -1:]
        asked = torch.cat((last, passages.read), dim=1)
        unread = _mean_loss(model, asked, unseen)
        for name, state in _variants(seen, unseen, heads, after_passage):
            gains[name, distance] = mean_estimate((unread - _mean_loss(model, asked, state)).tolist())
        for head in heads:
            share = float((slots_of(seen, head) - slots_of(unseen, head)).norm() / added[head])
            left[head, distance] = share
    return gains, left


def _variants(
    seen: State, unseen: State, heads: Sequence[KeepingHead], after_passage: Mapping[KeepingHead, Tensor]
) -> Iterator[tuple[str, State]]:
    yield "as read", seen
    yield "no later writes", changed(seen, heads, after_passage)
    for factor in FACTORS:
        slots = {
            head: slots_of(unseen, head) + factor * (slots_of(seen, head) - slots_of(unseen, head)) for head in heads
        }
        yield f"{factor} times as strong", changed(seen, heads, slots)


def _mean_loss(model: NsmModel, asked: Tensor, state: State) -> Tensor:
    """[B] nats a token of all but the first of `asked`; the slots' state is given, so the first is read again."""
    return sequence_losses(model, asked, state).mean(dim=1)


def mean_inputs(model: NsmModel, ids: Tensor) -> dict[int, Tensor]:
    """ids [B, T] -> by keyed layer, the mean [d] of what its projections read."""
    seen: dict[int, Tensor] = {}

    def remember(layer: int) -> Hook:
        def hook(mixer: KeyedMixer, arguments: tuple[Tensor, State, Segments]) -> None:
            seen[layer] = arguments[0].flatten(0, 1).mean(dim=0)

        return hook

    with _hooks(model, remember):
        model(ids, model.initial_state(len(ids)))
    return seen


@torch.no_grad()
def centre(model: NsmModel, means: Mapping[int, Tensor], *, strengths: float, keys: bool) -> None:
    """Changes weights of keeping heads: of a strength's logit, the part of the token is taken `strengths` times and
    without its mean; with `keys`, routes lose what they have in common."""
    for head in keeping_heads(model):
        mixer, mean = model.layers[head.layer].mixer, means[head.layer]
        assert isinstance(mixer, KeyedMixer)
        rows = [mixer.rates.weight[head.number : head.number + 1]]
        if keys:
            rows.append(mixer.project.weight[head.number * mixer.slots : (head.number + 1) * mixer.slots])
        for row in rows:
            row -= (row @ mean)[:, None] * mean / mean.square().sum()
        rows[0] *= strengths


@dataclasses.dataclass(frozen=True, slots=True)
class KeyUse:
    """How a head's written keys lie in a text. `dimensions`: of M, the participation ratio of their second moments;
    `common`: the squared length of their mean, all having length 1. `strength`: mean of what is written of a token."""

    head: KeepingHead
    dimensions: float
    common: float
    strength: float


def key_use(model: NsmModel, ids: Tensor) -> list[KeyUse]:
    """ids [B, T]."""
    seen: dict[int, dict[str, Tensor]] = {}

    def remember(layer: int) -> Hook:
        def hook(mixer: KeyedMixer, arguments: tuple[Tensor, State, Segments]) -> None:
            x, state, segments = arguments
            seen[layer], _, _ = mixer.tokens(x, state["conv_tail"], segments)

        return hook

    with _hooks(model, remember):
        model(ids, model.initial_state(len(ids)))
    return [_use_of(head, seen[head.layer]) for head in keeping_heads(model)]


@contextlib.contextmanager
def _hooks(model: NsmModel, make: Callable[[int], Hook]) -> Iterator[None]:
    """`make(layer)` is called before each keyed layer."""
    handles = [
        block.mixer.register_forward_pre_hook(make(layer))
        for layer, block in enumerate(model.layers)
        if isinstance(block.mixer, KeyedMixer)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _use_of(head: KeepingHead, tokens: Mapping[str, Tensor]) -> KeyUse:
    keys = tokens["k"][:, :, head.number].flatten(0, 1).double()
    moments = keys.T @ keys / len(keys)
    return KeyUse(
        head,
        dimensions=float(moments.trace() ** 2 / moments.square().sum()),
        common=float(keys.mean(dim=0).square().sum()),
        strength=float(tokens["strength"][..., head.number].mean()),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class KeyRanks:
    """Of a key's right tokens, with the right ones before them given: ranks [B, digits] among all tokens, from 1, and
    probabilities [B, digits]; `among_numbers` [B]: the first one's rank among those that any key begins with."""

    ranks: Tensor
    probabilities: Tensor
    among_numbers: Tensor


def key_ranks(
    model: NsmModel, texts: Tensor, tasks: Sequence[KeyTask], distances: Sequence[int]
) -> dict[int, KeyRanks]:
    """texts [B, N]; the result by distance."""
    needle, question, answer = (
        torch.tensor([list(getattr(task, name)) for task in tasks]) for name in ("needle", "question", "answers")
    )
    answer = answer[:, 0]
    firsts = torch.tensor(sorted({choice[0] for task in tasks for choice in task.answers}))
    state = read(model, torch.cat((texts[:, :LEAD], needle), dim=1), model.initial_state(len(texts)))
    found, position = {}, LEAD
    for distance in sorted(distances):
        end = LEAD + distance - question.shape[1]
        state, position = read(model, texts[:, position:end], state), max(end, position)
        hidden, _ = model.forward(torch.cat((question, answer[:, :-1]), dim=1), state)
        logits = model.logits(hidden[:, -answer.shape[1] :])
        right = logits.gather(-1, answer[..., None])
        probabilities = logits.softmax(dim=-1).gather(-1, answer[..., None])[..., 0]
        first = 1 + (logits[:, 0, firsts] > right[:, 0]).sum(dim=-1)
        found[distance] = KeyRanks(1 + (logits > right).sum(dim=-1), probabilities, first)
    return found


def report(loaded: LoadedNsm, args: argparse.Namespace) -> str:
    """The three tables."""
    tokenizer = loaded.tokenizer
    texts = [
        [tokenizer.end_of_text_id, *tokenizer.encode(document.text[: 8 * (max(args.distances) + 1024)])]
        for document in list(read_documents(args.data, args.split))[: args.books]
    ]
    parts = []
    with reading(loaded.model):
        ids = torch.tensor([text[:2048] for text in texts])
        if args.centre:
            means = mean_inputs(loaded.model, ids)
            centre(loaded.model, means, strengths=args.context, keys=args.centre == "keys")
        gains, left = passage_gains(loaded.model, cut(texts, max(args.distances)), args.distances)
        parts.append(_gain_table(gains, sorted(args.distances)))
        parts.append(_head_table(key_use(loaded.model, ids), left, sorted(args.distances)))
        parts.append(_keys(loaded, texts, args))
    return "\n\n".join(parts)


def _gain_table(gains: Mapping[tuple[str, int], Estimate], distances: Sequence[int]) -> str:
    names = dict.fromkeys(name for name, _ in gains)
    rows = [[name, *(_interval(gains[name, distance]) for distance in distances)] for name in names]
    return table(("slots of keeping heads", *(f"{distance:,} back" for distance in distances)), rows)


def _interval(estimate: Estimate) -> str:
    if estimate.high is None:
        return f"{estimate.mean:.3f}"
    return f"{estimate.mean:.3f} ± {estimate.high - estimate.mean:.3f}"


def _head_table(uses: Sequence[KeyUse], left: Mapping[tuple[KeepingHead, int], float], distances: Sequence[int]) -> str:
    rows = [
        [
            f"{use.head.layer}.{use.head.number}", f"{use.head.strength:.4f}", f"{use.strength:.4f}",
            f"{use.dimensions:.1f}", f"{use.common:.2f}",
            *(f"{left[use.head, distance]:.2f}" for distance in distances),
        ]
        for use in sorted(uses, key=lambda use: -use.head.strength)
    ]  # fmt: skip
    heads = ("head", "bias", "mean strength", "dimensions of keys", "common part",
             *(f"left after {distance:,}" for distance in distances))  # fmt: skip
    return table(heads, rows)


def _keys(loaded: LoadedNsm, texts: Sequence[Sequence[int]], args: argparse.Namespace) -> str:
    distances = sorted(args.key_distances)
    starts = [(text, LEAD * number) for number in range(args.keys) for text in texts]
    rows = torch.tensor([list(text[start : start + LEAD + max(distances)]) for text, start in starts])
    tasks = make_key_tasks(loaded.tokenizer.encode, len(rows))
    lines = []
    for distance, found in key_ranks(loaded.model, rows, tasks, distances).items():
        middle = np.median(found.ranks.numpy(), axis=0)
        first = (found.ranks == 1).double().mean(dim=0)
        cells = [
            f"{rank:.0f} / {share:.0%} / {probability:.3f}"
            for rank, share, probability in zip(middle, first, found.probabilities.mean(dim=0), strict=True)
        ]
        among = f"{(found.among_numbers == 1).double().mean():.0%}"
        lines.append([f"{distance:,}", *cells, among])
    digits = [f"token {number + 1}" for number in range(len(tasks[0].answers[0]))]
    return table(("tokens back", *digits, "token 1 first among numbers"), lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=Path("pulse-books-keyed"))
    parser.add_argument("--split", default="val")
    parser.add_argument("--books", type=int, default=4)
    parser.add_argument("--distances", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--keys", type=int, default=2, help="texts with a key, of each book")
    parser.add_argument("--key-distances", type=int, nargs="+", default=[32, 256, 1024, 4096])
    parser.add_argument("--centre", choices=("strengths", "keys"), help="change the weights first; keys: both")
    parser.add_argument("--context", type=float, default=1.0, help="with --centre: of the token's part of a strength")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"`{command_line()}`, commit {source_commit() or 'unknown'}\n", flush=True)
    print(report(load_checkpoint(args.model), args))


if __name__ == "__main__":
    main()
