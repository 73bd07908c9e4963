"""Packed training text and the same documents read alone give the same losses: nothing leaks between documents."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from nsm_core.config import ModelConfig
from nsm_core.model.nsm import NsmModel
from nsm_core.ops.slot_scan.chunked import CHUNK_LEN
from nsm_core.tokenizer import Tokenizer
from nsm_lab.evaluation.perplexity import encode_documents, evaluate
from nsm_lab.training.data import PackedBatches, TokenizedSplit, tokenize_split
from nsm_lab.training.data_files import read_documents
from tests.nsm_lab.training.conftest import WriteCorpus, make_texts


@pytest.fixture
def model(tiny_tokenizer: Tokenizer) -> NsmModel:
    """Random weights, those that start at zero included: its state matters to its logits."""
    config = ModelConfig(
        vocab_size=tiny_tokenizer.vocab_size,
        d_model=32,
        num_layers=2,
        num_heads=2,
        num_memory_slots=8,
        write_top_k=2,
        mlp_hidden=64,
    )
    model = NsmModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.2)
    return model


@torch.no_grad()
def packed_losses(model: NsmModel, split: TokenizedSplit, *, seq_len: int) -> tuple[float, int]:
    """Summed nats and number of targets of one epoch in a single row, the state carried from step to step."""
    packed = PackedBatches(split, rows=1, seq_len=seq_len, chunk_len=CHUNK_LEN, seed=5)
    state, nats, num_targets = model.state_spec.zeros(1), 0.0, 0
    for step in range(packed.steps_per_epoch):
        batch = packed.batch(step)
        hidden, state = model.read(batch.ids, state, valid=batch.valid, reset=batch.reset)
        nats += F.cross_entropy(model.logits(hidden)[0], batch.targets[0], reduction="sum").item()
        num_targets += int(batch.valid.sum())
    return nats, num_targets


@pytest.mark.parametrize("num_chunks", [1, 2, 6])
def test_packed_documents_cost_what_each_costs_alone(
    model: NsmModel, write_corpus: WriteCorpus, tiny_tokenizer: Tokenizer, tmp_path: Path, num_chunks: int
) -> None:
    texts = make_texts(14, max_words=120)
    total_chunks = sum(-(-(len(tiny_tokenizer.encode(text)) + 1) // CHUNK_LEN) for text in texts)
    texts += ["sea"] * (-total_chunks % 6)  # one chunk each: whole segments only, so that no tail is cut
    data_dir = write_corpus("x-train.jsonl.zst", texts)
    split = tokenize_split(data_dir, "train", tiny_tokenizer, tmp_path / "cache")
    nats, num_targets = packed_losses(model, split, seq_len=num_chunks * CHUNK_LEN)
    alone = evaluate(model, encode_documents(tiny_tokenizer, read_documents(data_dir, "train"))).total
    assert num_targets == alone.num_tokens
    assert nats == pytest.approx(alone.nats, rel=1e-5)
