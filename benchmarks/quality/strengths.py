"""What weaker or stronger writes of the heads that keep would bring, without training: `python -m
benchmarks.quality.strengths --data books --strengths 0.008,0.005,0.004,0.003,0.0022 --context 0.5`.

The biases of these heads are moved until they write so much of a token on average, the head that writes most first;
`--context` is what is left of the part that depends on the token. `--times` and `--others-times` multiply the odds of
all writes of the keeping heads and of the others instead: nothing is judged first, so a CPU can do it. Printed are the
loss over the first 4,096 tokens of the books, and the gains on passages that were read so many tokens before, against
the same passage read by a state that began right after them. 95 % intervals over books.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from nsm_core.execution.native.executor import NativeExecutor
from nsm_core.model.loader import load_checkpoint
from nsm_core.model.nsm import NsmModel
from nsm_lab.evaluation.executed import ExecutedModel
from nsm_lab.evaluation.history.estimates import mean_estimate
from nsm_lab.evaluation.history.rows import read
from nsm_lab.evaluation.reading import EvaluatedModel, reading, sequence_losses
from nsm_lab.training.data_files import read_documents
from nsm_lab.training.keeping import keeping_numbers, keyed_mixers, mean_strengths

PASSAGES, PASSAGE = 6, 256  # of a book; tokens
JUDGED_TOKENS, JUDGED_PART, ROUNDS = 8192, 2048, 4
LOSS_TOKENS = 4096


def judged(model: NsmModel, texts: Tensor) -> list[Tensor]:
    """Mean strengths [H] of each keyed layer on the beginnings of texts [B, N]."""
    starts = range(0, min(JUDGED_TOKENS, texts.shape[1] // JUDGED_PART * JUDGED_PART), JUDGED_PART)
    of_parts = [mean_strengths(model, texts[:, start : start + JUDGED_PART]) for start in starts]
    return [torch.stack(of_layer).mean(dim=0) for of_layer in zip(*of_parts, strict=True)]


@torch.no_grad()
def multiply_strengths(model: NsmModel, keeping: float, others: float) -> None:
    """Multiplies the odds b / (1 - b) of the strengths b of the heads that keep, and of all others."""
    for mixer in keyed_mixers(model):
        factors = torch.full((mixer.heads,), others)
        factors[keeping_numbers(mixer)] = keeping
        mixer.rates.bias[: mixer.heads] += factors.log()


@torch.no_grad()
def set_strengths(model: NsmModel, texts: Tensor, wanted: Sequence[float], context: float) -> None:
    """Moves the biases of keeping heads until they write `wanted` on average; none: what they wrote before."""
    mixers = keyed_mixers(model)
    before = judged(model, texts)
    orders = [
        heads[mean[heads].argsort(descending=True)]
        for heads, mean in zip(map(keeping_numbers, mixers), before, strict=True)
    ]
    for mixer, order in zip(mixers, orders, strict=True):
        mixer.rates.weight[order] *= context
    for _ in range(ROUNDS):
        for mixer, order, mean, was in zip(mixers, orders, judged(model, texts), before, strict=True):
            aims = was[order] if not wanted else was.new_tensor(wanted)
            mixer.rates.bias[order] += (aims / mean[order]).log()


def passage_gains(model: EvaluatedModel, texts: Tensor, distance: int) -> Tensor:
    """[B] nats a token, the mean over PASSAGES that stand one after the other at the beginning of texts [B, N]."""
    losses = []
    for position in (0, PASSAGES * PASSAGE):  # read from the first passage on, or after the last
        state, of_passages = model.initial_state(len(texts)), []
        for start in range(0, PASSAGES * PASSAGE, PASSAGE):
            end = start + distance - 1
            state, position = read(model, texts[:, position:end], state), end
            asked = torch.cat((texts[:, end : end + 1], texts[:, start : start + PASSAGE]), dim=1)
            of_passages.append(sequence_losses(model, asked, state).mean(dim=1))
        losses.append(torch.stack(of_passages).mean(dim=0))
    return losses[1] - losses[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=Path("pulse-books-keyed"))
    parser.add_argument("--books", type=int, default=20)
    parser.add_argument("--distances", type=int, nargs="+", default=[16384, 4096, 1024])
    parser.add_argument("--strengths", default="", help="with commas between; without: as trained")
    parser.add_argument("--context", type=float, default=1.0)
    parser.add_argument("--times", type=float, default=1.0, help="of the heads that keep")
    parser.add_argument("--others-times", type=float, default=1.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    wanted = [float(part) for part in options.strengths.split(",") if part]
    loaded = load_checkpoint(options.model, options.device)
    length = max(*options.distances, LOSS_TOKENS) + (PASSAGES + 1) * PASSAGE
    books = list(read_documents(options.data, "val"))[: options.books]
    encoded = [loaded.tokenizer.encode(book.text[: 8 * length])[:length] for book in books]
    texts = torch.tensor([ids for ids in encoded if len(ids) == length], device=options.device)
    how = f"strengths {options.strengths or 'as trained'}, context {options.context}"
    if wanted or options.context != 1.0:
        with reading(loaded.model, autocast=options.device.startswith("cuda")):
            set_strengths(loaded.model, texts, wanted, options.context)
    multiply_strengths(loaded.model, options.times, options.others_times)
    print(f"{len(texts)} books; {how}, times {options.times}, others times {options.others_times}", flush=True)
    report(loaded.model, texts, options.distances)


def report(model: NsmModel, texts: Tensor, distances: Sequence[int]) -> None:
    """Prints loss and gains; on a CPU by its kernels in int8."""
    subject: EvaluatedModel = model
    if texts.device.type == "cpu":
        subject = ExecutedModel(NativeExecutor(model, num_rows=len(texts)), model.state_spec)
    with reading(subject, autocast=texts.device.type == "cuda"):
        loss = sequence_losses(subject, texts[:, : LOSS_TOKENS + 1], subject.initial_state(len(texts))).mean(dim=1)
        print(f"loss {float(loss.mean()):.4f}", flush=True)
        for distance in distances:
            gain = mean_estimate(passage_gains(subject, texts, distance).double().tolist())
            half = math.nan if gain.high is None else gain.high - gain.mean
            print(f"{distance:,} tokens back: {gain.mean:.4f} ± {half:.4f}", flush=True)


if __name__ == "__main__":
    main()
