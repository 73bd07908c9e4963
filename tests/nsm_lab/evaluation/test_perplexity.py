from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from nsm_core.errors import ConfigError
from nsm_core.model.nsm import NsmModel
from nsm_core.state.spec import State
from nsm_core.tokenizer import Tokenizer
from nsm_lab.evaluation.losses import PositionLosses
from nsm_lab.evaluation.perplexity import encode_document, encode_documents, evaluate
from nsm_lab.training.data_files import Document

BUCKETS = (0, 8, 32, 64)


def measure(model: NsmModel, tokenizer: Tokenizer, documents: list[Document], **options: Any) -> PositionLosses:
    return evaluate(model, encode_documents(tokenizer, documents), **options)


def nats(losses: PositionLosses) -> list[float]:
    return [bucket.nats for bucket in losses.buckets]


@given(text=st.text(max_size=60), max_tokens=st.none() | st.integers(1, 40))
def test_bytes_and_words_of_the_targets_add_up_to_the_text(
    tiny_tokenizer: Tokenizer, text: str, max_tokens: int | None
) -> None:
    document = encode_document(tiny_tokenizer, text, max_tokens)
    ids = tiny_tokenizer.encode(text)
    assert len(document) == min(len(ids) + 1, max_tokens or len(ids) + 1)
    assert document.tokens.tolist() == [0, *ids, 0][: len(document) + 1]
    assert len(document.num_words) == len(document)
    read = tiny_tokenizer.decode_bytes(ids[: len(document)])
    assert document.num_bytes.sum() == len(read)
    if len(document) == len(ids) + 1:
        assert document.num_words.sum() == len(text.split())


def test_a_word_counts_at_the_token_where_it_begins(tiny_tokenizer: Tokenizer) -> None:
    text = "one é\u2028tüo  three"
    document = encode_document(tiny_tokenizer, text)
    raw = [tiny_tokenizer.token_bytes(token) for token in document.tokens[1:-1].tolist()]
    for count in range(len(raw) + 1):
        so_far = b"".join(raw[:count]).decode("utf-8", "replace")
        assert document.num_words[:count].sum() == len(so_far.split())


def test_a_uniform_model_costs_log2_of_the_vocabulary_a_token(
    model: NsmModel, tiny_tokenizer: Tokenizer, documents: list[Document]
) -> None:
    torch.nn.init.zeros_(model.embedding.weight)
    losses = measure(model, tiny_tokenizer, documents, segment_len=64, buckets=BUCKETS)
    num_tokens = sum(len(tiny_tokenizer.encode(d.text)) + 1 for d in documents)  # end of text is a target too
    num_bytes = sum(len(d.text.encode()) for d in documents)
    total = losses.total
    assert (total.num_tokens, total.num_bytes) == (num_tokens, num_bytes)
    assert total.num_words == sum(len(d.text.split()) for d in documents)
    bits_per_token = math.log2(tiny_tokenizer.vocab_size)
    assert total.bits_per_byte == pytest.approx(bits_per_token * num_tokens / num_bytes, rel=1e-6)
    assert losses.num_documents == len(documents)
    for bucket in losses.buckets:
        assert bucket.nats_per_token == pytest.approx(math.log(tiny_tokenizer.vocab_size), rel=1e-6)


def test_losses_are_those_of_one_plain_forward_pass(
    model: NsmModel, tiny_tokenizer: Tokenizer, documents: list[Document]
) -> None:
    want = np.zeros(len(BUCKETS))
    for document in documents:
        tokens = torch.tensor([[0, *tiny_tokenizer.encode(document.text), 0]])
        with torch.no_grad():
            hidden, _ = model(tokens[:, :-1], model.initial_state(1))
            losses = F.cross_entropy(model.logits(hidden)[0], tokens[0, 1:], reduction="none")
        for position, loss in enumerate(losses.tolist()):
            want[np.searchsorted(BUCKETS, position, side="right") - 1] += loss
    assert nats(measure(model, tiny_tokenizer, documents, buckets=BUCKETS)) == pytest.approx(want.tolist(), rel=1e-5)


@pytest.mark.parametrize(("segment_len", "batch_documents"), [(1, 5), (7, 2), (64, 1), (4096, 3)])
def test_segments_and_batches_do_not_change_the_result(
    model: NsmModel, tiny_tokenizer: Tokenizer, documents: list[Document], segment_len: int, batch_documents: int
) -> None:
    want = measure(model, tiny_tokenizer, documents, segment_len=50, batch_documents=4, buckets=BUCKETS)
    got = measure(
        model,
        tiny_tokenizer,
        documents,
        segment_len=segment_len,
        batch_documents=batch_documents,
        buckets=BUCKETS,
    )
    assert nats(got) == pytest.approx(nats(want), rel=1e-5)
    assert got.total.num_tokens == want.total.num_tokens


def test_models_with_attention_read_whole_documents_too(
    any_model: NsmModel, tiny_tokenizer: Tokenizer, documents: list[Document]
) -> None:
    """Documents of more tokens than the attention of 64 reaches back, in segments of less and of more."""
    short, long = (
        measure(any_model, tiny_tokenizer, documents, segment_len=segment_len, buckets=BUCKETS)
        for segment_len in (20, 128)
    )
    assert short.total.num_tokens > 5 * 64
    assert nats(short) == pytest.approx(nats(long), rel=1e-4)


def test_logits_in_pieces_give_the_same_losses(
    model: NsmModel, tiny_tokenizer: Tokenizer, documents: list[Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    want = measure(model, tiny_tokenizer, documents)
    widths: list[int] = []
    logits = model.logits

    def watched(hidden: torch.Tensor) -> torch.Tensor:
        widths.append(len(hidden))
        return logits(hidden)

    monkeypatch.setattr("nsm_lab.evaluation.reading._LOGITS_POSITIONS", 10)
    monkeypatch.setattr(model, "logits", watched)
    assert nats(measure(model, tiny_tokenizer, documents)) == pytest.approx(nats(want), rel=1e-6)
    assert max(widths) == 10


def test_a_cut_document_ends_without_end_of_text(model: NsmModel, tiny_tokenizer: Tokenizer) -> None:
    document = Document(id="d", text="The sea was calm. " * 30)
    losses = evaluate(model, [encode_document(tiny_tokenizer, document.text, 20)], buckets=(0, 8))
    assert [bucket.num_tokens for bucket in losses.buckets] == [8, 12]
    ids = tiny_tokenizer.encode(document.text)[:20]
    assert losses.total.num_bytes == len(tiny_tokenizer.decode_bytes(ids))


def test_a_batch_of_documents_is_encoded_as_each_of_them(tiny_tokenizer: Tokenizer, documents: list[Document]) -> None:
    for document, encoded in zip(documents * 5, encode_documents(tiny_tokenizer, documents * 5), strict=True):
        alone = encode_document(tiny_tokenizer, document.text)
        for name in ("tokens", "num_bytes", "num_words"):
            assert np.array_equal(getattr(encoded, name), getattr(alone, name))


def test_rows_without_padding_are_read_as_full_rows(
    model: NsmModel, tiny_tokenizer: Tokenizer, documents: list[Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, bool]] = []
    forward = model.forward

    def watched(ids: torch.Tensor, state: State, lengths: torch.Tensor | None = None) -> tuple[torch.Tensor, State]:
        seen.append((len(ids), lengths is None))
        return forward(ids, state, lengths)

    monkeypatch.setattr(model, "forward", watched)
    cut = [document.cut(40) for document in encode_documents(tiny_tokenizer, documents)]
    evaluate(model, cut, segment_len=20, batch_documents=5)
    assert seen == [(5, False), (3, True)]  # two short documents are padded once, then gone


def test_the_mode_of_the_model_is_left_as_it_was(
    model: NsmModel, tiny_tokenizer: Tokenizer, documents: list[Document]
) -> None:
    model.train()
    loads = [block.mixer.router.slot_load.clone() for block in model.layers]
    measure(model, tiny_tokenizer, documents[:2])
    assert model.training
    for block, load in zip(model.layers, loads, strict=True):
        assert torch.equal(block.mixer.router.slot_load, load)  # training statistics saw nothing of it


def test_bf16_is_close_to_fp32(model: NsmModel, tiny_tokenizer: Tokenizer, documents: list[Document]) -> None:
    fp32 = measure(model, tiny_tokenizer, documents).total.nats
    bf16 = measure(model, tiny_tokenizer, documents, autocast=True).total.nats
    assert bf16 == pytest.approx(fp32, rel=0.02)
    assert bf16 != fp32


def test_no_documents_is_an_error(model: NsmModel, tiny_tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="no documents"):
        measure(model, tiny_tokenizer, [])
