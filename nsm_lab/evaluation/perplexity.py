"""How well a model predicts documents: loss by position, each document read from its start to its end."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from nsm_core.errors import ConfigError
from nsm_core.tokenizer import Tokenizer
from nsm_lab.evaluation.losses import DEFAULT_BUCKETS, FloatArray, IntArray, LossTally, PositionLosses
from nsm_lab.evaluation.reading import EvaluatedModel, reading, token_losses
from nsm_lab.training.data_files import Document

_WORD = re.compile(r"\S+")
# Documents that are encoded at once, in parallel.
_ENCODE_DOCUMENTS = 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EncodedDocument:
    """A document as inputs `tokens[:-1]` and targets `tokens[1:]`, with the bytes and words of each target."""

    tokens: IntArray  # [T + 1]: end_of_text (the start of every text), the text, end_of_text unless it was cut
    num_bytes: IntArray  # [T]
    num_words: IntArray  # [T]

    def __len__(self) -> int:
        """T, the number of targets."""
        return len(self.num_bytes)

    def cut(self, max_tokens: int | None) -> EncodedDocument:
        """Its first `max_tokens` targets; None: all of them."""
        if max_tokens is None:
            return self
        return EncodedDocument(
            tokens=self.tokens[: max_tokens + 1],
            num_bytes=self.num_bytes[:max_tokens],
            num_words=self.num_words[:max_tokens],
        )


def encode_document(tokenizer: Tokenizer, text: str, max_tokens: int | None = None) -> EncodedDocument:
    """At most `max_tokens` targets of `text`.

    The last target of a document that is read to its end is end_of_text: its nats count, as 0 bytes and 0 words.
    """
    return _with_counts(tokenizer, text, tokenizer.encode(text)).cut(max_tokens)


def encode_documents(tokenizer: Tokenizer, documents: Iterable[Document]) -> list[EncodedDocument]:
    """`encode_document` of each, several at a time."""
    encoded: list[EncodedDocument] = []
    texts = iter(tqdm((document.text for document in documents), unit="document", desc="encode", disable=None))
    while part := list(itertools.islice(texts, _ENCODE_DOCUMENTS)):
        for text, ids in zip(part, tokenizer.encode_batch(part), strict=True):
            encoded.append(_with_counts(tokenizer, text, ids))
    return encoded


def _with_counts(tokenizer: Tokenizer, text: str, ids: list[int]) -> EncodedDocument:
    num_bytes = np.fromiter((len(tokenizer.token_bytes(token)) for token in ids), np.int64, count=len(ids))
    # A word belongs to the token that holds its first byte.
    ends = np.cumsum(num_bytes)
    num_words = np.bincount(np.searchsorted(ends, _word_starts(text), side="right"), minlength=len(ids))
    end = tokenizer.end_of_text_id
    return EncodedDocument(
        tokens=np.array([end, *ids, end], np.int64),
        num_bytes=np.append(num_bytes, 0),
        num_words=np.append(num_words, 0),
    )


def _word_starts(text: str) -> IntArray:
    """UTF-8 offsets of the first byte of each whitespace-separated word."""
    is_character_start = (np.frombuffer(text.encode("utf-8"), np.uint8) & 0xC0) != 0x80
    words = np.array([match.start() for match in _WORD.finditer(text)], np.int64)
    return np.flatnonzero(is_character_start)[words]


def evaluate(
    model: EvaluatedModel,
    documents: Iterable[EncodedDocument],
    *,
    segment_len: int = 512,
    batch_documents: int = 8,
    buckets: Sequence[int] = DEFAULT_BUCKETS,
    autocast: bool = False,
) -> PositionLosses:
    """Loss of `model` on `documents` by position bucket, on the device the model is on.

    Each document is read from its start, `segment_len` tokens a call, with the state carried on: position 10,000 is
    predicted from all that came before. `segment_len` and `batch_documents` are matters of speed and memory only.
    `autocast`: bf16 instead of fp32. Raises ConfigError for bucket edges that do not ascend, or without documents.
    """
    tally = LossTally(buckets)
    # Documents of like length side by side: no row waits long for another.
    ordered = sorted(documents, key=len, reverse=True)
    if not ordered:
        raise ConfigError("there are no documents to evaluate on")
    with (
        tqdm(total=sum(map(len, ordered)), unit="token", unit_scale=True, desc="evaluate", disable=None) as bar,
        reading(model, autocast=autocast) as device,
    ):
        for first in range(0, len(ordered), batch_documents):
            group = ordered[first : first + batch_documents]
            for document, start, nats in _group_losses(model, group, segment_len, device):
                part = slice(start, start + len(nats))
                tally.add(
                    start=start, nats=nats, num_bytes=document.num_bytes[part], num_words=document.num_words[part]
                )
                bar.update(len(nats))
    return tally.result(len(ordered))


def _group_losses(
    model: EvaluatedModel, group: list[EncodedDocument], segment_len: int, device: torch.device
) -> Iterator[tuple[EncodedDocument, int, FloatArray]]:
    """(document, position of its first target here, nats [T]) for each segment of each document; longest first.

    A row leaves the batch when its document ends, so at most one segment of it is padded.
    """
    state = model.initial_state(len(group))
    for start in range(0, len(group[0]), segment_len):
        active = [document for document in group if len(document) > start]
        state = {name: value[: len(active)] for name, value in state.items()}
        ids, targets, lengths = _segment(active, start, segment_len)
        is_ragged = bool((lengths < ids.shape[1]).any())
        hidden, state = model.forward(ids.to(device), state, lengths.to(device) if is_ragged else None)
        valid = torch.arange(ids.shape[1]) < lengths[:, None]
        losses = token_losses(model, hidden[valid.to(device)], targets[valid].to(device)).double().cpu()
        for document, nats in zip(active, torch.split(losses, lengths.tolist()), strict=True):
            yield document, start, nats.numpy()


def _segment(active: list[EncodedDocument], start: int, segment_len: int) -> tuple[Tensor, Tensor, Tensor]:
    """Right-padded ids and targets [B, T], and lengths [B]; the first row is the longest."""
    lengths = [min(len(document) - start, segment_len) for document in active]
    rows = torch.zeros(len(active), lengths[0] + 1, dtype=torch.int64)
    for row, document, length in zip(rows, active, lengths, strict=True):
        row[: length + 1] = torch.from_numpy(document.tokens[start : start + length + 1])
    return rows[:, :-1], rows[:, 1:], torch.tensor(lengths)
