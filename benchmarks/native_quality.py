"""What int8, int4 and running states in fp16 cost in quality: `python -m benchmarks.native_quality`.

A table, then one line of JSON. The same documents are read by the eager executor in fp32 and by the native ones, with
the weights of the same file: bits per byte of each, and how often their most likely next token is the eager executor's.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measured_model import MEASURED_MODEL
from nsm_core.execution.base import Executor
from nsm_core.execution.eager import EagerExecutor
from nsm_core.execution.names import ExecutorName
from nsm_core.execution.native.executor import NativeExecutor
from nsm_core.execution.native.precision import HALF_STATES, precision_of
from nsm_core.execution.native.weights import NativeWeights
from nsm_core.model.loader import load_checkpoint
from nsm_core.model.nsm import NsmModel
from nsm_lab.evaluation.perplexity import EncodedDocument, encode_document
from nsm_lab.provenance import command_line, source_commit
from nsm_lab.training.data_files import Split, read_documents

PIECE_LEN = 512  # tokens of a call
REFERENCE = "eager"
NSM_EXECUTORS: tuple[ExecutorName, ...] = ("native", "native-int4", *HALF_STATES)
SPLITS_READ: tuple[Split, ...] = ("test", "val")  # what the model was not trained on


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """nats [T] of the targets, most_likely [T] ids, by position."""

    nats: Tensor
    most_likely: Tensor


def read(executor: Executor, document: EncodedDocument) -> Reading:
    """The document from its start, with the state carried on."""
    tokens = torch.from_numpy(document.tokens)
    executor.pool.lease(0)
    executor.pool.write(0, executor.initial)
    nats, most_likely = [], []
    for ids, targets in zip(tokens[:-1].split(PIECE_LEN), tokens[1:].split(PIECE_LEN), strict=True):
        logits = executor.logits(executor.read((0,), (ids.tolist(),))[0])
        nats.append(F.cross_entropy(logits, targets, reduction="none").double())
        most_likely.append(logits.argmax(dim=-1))
    executor.pool.free(0)
    return Reading(torch.cat(nats), torch.cat(most_likely))


def bits_per_byte(readings: Iterable[Reading], num_bytes: int) -> float:
    return float(sum(reading.nats.sum() for reading in readings)) / math.log(2) / num_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """`more`: bits per byte above the reference's, `share`: of it. `largest`: difference of a token, in nats."""

    executor: str
    bits_per_byte: float
    more: float
    share: float
    agreement: float
    largest: float


def compare(name: str, readings: Sequence[Reading], reference: Sequence[Reading], num_bytes: int) -> Row:
    own, base = bits_per_byte(readings, num_bytes), bits_per_byte(reference, num_bytes)
    pairs = list(zip(readings, reference, strict=True))
    agreeing = torch.cat([one.most_likely == other.most_likely for one, other in pairs])
    largest = max(float((one.nats - other.nats).abs().max()) for one, other in pairs)
    return Row(name, own, own - base, own / base - 1, float(agreeing.double().mean()), largest)


def make_executors(model: NsmModel, names: Iterable[ExecutorName], *, num_threads: int) -> dict[str, Executor]:
    """The reference, and the native executors of these names."""
    executors: dict[str, Executor] = {REFERENCE: EagerExecutor(model, num_rows=1)}
    for name in names:
        weights = NativeWeights(model, precision=precision_of(name))
        executors[name] = NativeExecutor(
            model, num_rows=1, num_threads=num_threads, weights=weights, half_states=name in HALF_STATES
        )
    return executors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MEASURED_MODEL, help="model directory or name")
    parser.add_argument(
        "--data", type=Path, default=Path("data/books-sample"), help="directory of *-test.jsonl.zst and *-val.jsonl.zst"
    )
    parser.add_argument("--max-tokens", type=int, default=4096, help="of each document")
    parser.add_argument(
        "--joined", action="store_true", help="all documents as one text: its state lives on to its end"
    )
    parser.add_argument("--executors", nargs="+", choices=NSM_EXECUTORS, default=NSM_EXECUTORS)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    loaded = load_checkpoint(args.model)
    texts = [document.text for split in SPLITS_READ for document in read_documents(args.data, split)]
    texts = ["\n\n".join(texts)] if args.joined else texts
    documents = [encode_document(loaded.tokenizer, text, args.max_tokens) for text in texts]
    executors = make_executors(loaded.model, args.executors, num_threads=args.threads)
    readings = {name: [read(executor, document) for document in documents] for name, executor in executors.items()}
    num_bytes = sum(int(document.num_bytes.sum()) for document in documents)
    rows = [compare(name, readings[name], readings[REFERENCE], num_bytes) for name in readings]
    num_tokens = sum(len(document) for document in documents)
    print(f"$ {command_line()}\n{loaded.name}: {len(documents)} documents, {num_tokens} tokens, {num_bytes} bytes\n")
    print(f"{'':<24}{'bits per byte':>14}{'more':>10}{'':>10}{'same first':>12}{'largest, nats':>15}")
    for row in rows:
        print(
            f"{row.executor:<24}{row.bits_per_byte:>14.5f}{row.more:>+10.5f}{100 * row.share:>+9.3f}%"
            f"{100 * row.agreement:>11.2f}%{row.largest:>15.3f}"
        )
    result = {"commit": source_commit(), "model": loaded.name, "fingerprint": loaded.fingerprint, "tokens": num_tokens}
    print(json.dumps({**result, "rows": [dataclasses.asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
