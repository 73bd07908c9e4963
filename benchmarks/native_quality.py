"""What int8 costs in quality: `python -m benchmarks.native_quality`. A table, then one line of JSON.

The same documents read by the eager executor in fp32 and by the native one, with the weights of the same file: bits
per byte of each, and how often their most likely next tokens agree.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from nsm_core.execution.base import Executor
from nsm_core.execution.eager import EagerExecutor
from nsm_core.execution.native.executor import NativeExecutor
from nsm_core.model.loader import load_checkpoint
from nsm_lab.evaluation.perplexity import EncodedDocument, encode_document
from nsm_lab.provenance import source_commit
from nsm_lab.training.data_files import Split, read_documents

PIECE_LEN = 512  # tokens of a call
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="model directory (default: the bundled one)")
    parser.add_argument(
        "--data", type=Path, default=Path("data/books-sample"), help="directory of *-test.jsonl.zst and *-val.jsonl.zst"
    )
    parser.add_argument("--max-tokens", type=int, default=4096, help="of each document")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    loaded = load_checkpoint(args.model)
    texts = [document.text for split in SPLITS_READ for document in read_documents(args.data, split)]
    documents = [encode_document(loaded.tokenizer, text, args.max_tokens) for text in texts]
    executors = {
        "eager": EagerExecutor(loaded.model, num_rows=1),
        "native": NativeExecutor(loaded.model, num_rows=1, num_threads=args.threads),
    }
    readings = {name: [read(executor, document) for document in documents] for name, executor in executors.items()}
    num_bytes = sum(int(document.num_bytes.sum()) for document in documents)
    bits = {name: bits_per_byte(parts, num_bytes) for name, parts in readings.items()}
    pairs = list(zip(readings["eager"], readings["native"], strict=True))
    agreeing = torch.cat([eager.most_likely == native.most_likely for eager, native in pairs])
    largest = max(float((eager.nats - native.nats).abs().max()) for eager, native in pairs)
    loss = bits["native"] / bits["eager"] - 1
    print(f"{len(documents)} documents, {len(agreeing)} tokens, {num_bytes} bytes")
    print(f"bits per byte: eager fp32 {bits['eager']:.5f}, native int8 {bits['native']:.5f}: {100 * loss:+.3f} %")
    print(f"most likely token the same at {100 * float(agreeing.double().mean()):.2f} % of positions; ", end="")
    print(f"largest difference of a token {largest:.3f} nats")
    row = {"bits_per_byte": bits, "loss": loss, "agreement": float(agreeing.double().mean()), "tokens": len(agreeing)}
    print(json.dumps({"commit": source_commit(), "model": loaded.name, "fingerprint": loaded.fingerprint, **row}))


if __name__ == "__main__":
    main()
