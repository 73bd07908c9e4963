"""Token ids of a corpus split in a memory-mapped cache, and the packed batches that training reads from them."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from tqdm import tqdm

from nsm_core.errors import ConfigError
from nsm_core.hashing import file_identity, identity_of
from nsm_core.tokenizer import Tokenizer
from nsm_lab.training.data_files import Document, Split, corpus_files, read_documents

IGNORED_TARGET = -100  # the index that torch's cross entropy leaves out
_BATCH_CHARS = 8_000_000  # text encoded at once: enough for all cores, some hundred MB of ids
_LAYOUT_VERSION = 1  # part of the cache key: raise it when the files below change

IntArray = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedSplit:
    """Ids of all documents in one array: every document is `[end_of_text] + ids`, and one end_of_text closes the last.

    So the target of a position is always the next element of `ids`.
    Document i lies at `ids[offsets[i] : offsets[i + 1]]`.
    """

    name: Split
    ids: npt.NDArray[np.unsignedinteger]  # [num_documents + num_tokens + 1] uint16 or uint32
    offsets: IntArray  # [num_documents + 1]
    num_bytes: int  # UTF-8 bytes of the texts
    num_words: int  # whitespace-separated
    weights: npt.NDArray[np.uint8] | None = None  # as `ids`: of each in the loss, 0 to leave it out; None: all alike
    turns: npt.NDArray[np.uint16] | None = None  # of a token that a loop says again, how far back its first turn has it

    @property
    def num_documents(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of the texts, without the start tokens."""
        return len(self.ids) - len(self.offsets)


def tokenize_split(data_dir: Path, split: Split, tokenizer: Tokenizer, cache_dir: Path) -> TokenizedSplit:
    """Encodes a split once; later calls map the cache. Raises ConfigError for a corpus that cannot be read.

    The cache is keyed by the tokenizer and by the names and contents of the files, so it can neither go stale nor be
    taken for another corpus, and may be moved to another machine. Safe to call from several processes at once.
    """
    files = corpus_files(data_dir, split)
    entry = cache_dir / f"{split}-{_cache_key(files, tokenizer)}"
    if not entry.is_dir():
        partial = cache_dir / f".{entry.name}-{secrets.token_hex(8)}"
        partial.mkdir(parents=True)
        try:
            num_stored_bytes = sum(path.stat().st_size for path in files)
            with tqdm(total=num_stored_bytes, unit="B", unit_scale=True, desc=f"tokenize {split}", disable=None) as bar:
                _write_entry(partial, read_documents(data_dir, split, on_bytes=bar.update), tokenizer)
            _publish(partial, entry)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return _open_entry(entry, split)


def _cache_key(files: list[Path], tokenizer: Tokenizer) -> str:
    contents = ((path.name, file_identity(path)) for path in files)
    return identity_of(
        str(_LAYOUT_VERSION), tokenizer.fingerprint, *itertools.chain.from_iterable(contents), num_bytes=12
    )


def _publish(partial: Path, entry: Path) -> None:
    """One rename makes the entry visible whole; when another process was first, its equal entry stays."""
    try:
        partial.rename(entry)
    except OSError:
        if not entry.is_dir():
            raise


def _write_entry(directory: Path, documents: Iterable[Document], tokenizer: Tokenizer) -> None:
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    lengths: list[int] = []
    num_bytes = num_words = 0
    with (directory / "ids.bin").open("wb") as file:
        for texts in _text_batches(documents):
            num_bytes += sum(len(text.encode("utf-8")) for text in texts)
            num_words += sum(len(text.split()) for text in texts)
            for ids in tokenizer.encode_batch(texts):
                np.array([tokenizer.end_of_text_id, *ids], dtype).tofile(file)
                lengths.append(1 + len(ids))
        np.array([tokenizer.end_of_text_id], dtype).tofile(file)
        file.flush()
        os.fsync(file.fileno())
    np.save(directory / "offsets.npy", np.cumsum([0, *lengths], dtype=np.int64))
    meta = {"dtype": dtype.str, "num_bytes": num_bytes, "num_words": num_words}
    (directory / "meta.json").write_text(json.dumps(meta) + "\n", "utf-8")


def _text_batches(documents: Iterable[Document]) -> Iterator[list[str]]:
    batch: list[str] = []
    num_chars = 0
    for document in documents:
        batch.append(document.text)
        num_chars += len(document.text)
        if num_chars >= _BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


def _open_entry(entry: Path, name: Split) -> TokenizedSplit:
    try:
        meta = json.loads((entry / "meta.json").read_text("utf-8"))
        ids = np.memmap(entry / "ids.bin", dtype=np.dtype(meta["dtype"]), mode="r")
        offsets = np.load(entry / "offsets.npy")
        if len(ids) != offsets[-1] + 1:
            raise ValueError(f"{len(ids)} ids where {offsets[-1] + 1} are due")
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"the token cache {entry} is damaged ({error}): delete it and try again") from error
    return TokenizedSplit(name=name, ids=ids, offsets=offsets, num_bytes=meta["num_bytes"], num_words=meta["num_words"])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One training step's input. Padding has `valid` False, target -100 and the end-of-text id."""

    ids: Tensor  # [rows, seq_len] int64
    targets: Tensor  # [rows, seq_len] int64: the next token of the same document
    valid: Tensor  # [rows, seq_len] bool
    reset: Tensor  # [rows, seq_len // chunk_len] bool: the chunk begins at the learned start
    has_inner_starts: bool  # some document starts elsewhere than at the beginning of a row
    weights: Tensor | None = None  # [rows, seq_len] uint8: of the targets in the loss; None: all alike
    turns: Tensor | None = (
        None  # [rows, seq_len] int64: of targets that a loop says again, tokens back to its first turn
    )
    num_slots: Tensor | None = None  # [rows] int64: slots of a head that a row is read with; None: all


def document_order(seed: int, epoch: int, num_documents: int) -> IntArray:
    """The order in which an epoch lays out the documents [num_documents]."""
    return np.random.default_rng((seed, epoch)).permutation(num_documents)


@dataclasses.dataclass(frozen=True, slots=True)
class _Layout:
    """One epoch's virtual stream: document `order[i]` begins at chunk `first_chunks[i]`."""

    epoch: int
    order: IntArray  # [num_documents]
    first_chunks: IntArray  # [num_documents], ascending


class PackedBatches:
    """Batches as a pure function of (seed, step), so that a run resumes by its step number alone.

    Each epoch lays the documents, in a seeded order, one after the other, each from the next multiple of `chunk_len`
    on: a document border is always a chunk border, where the model's state is reset, and no document sees another.
    That stream is cut into rows * world_size strips of equal length, one a row, and step s of the epoch reads segment
    s of each strip: a row's consecutive steps are consecutive text, and its state may be carried over. At the end
    less than rows * world_size * seq_len positions are left out.
    """

    def __init__(
        self,
        split: TokenizedSplit,
        rows: int,
        seq_len: int,
        chunk_len: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """`rows` is per rank. Raises ConfigError for impossible sizes, or when the split is smaller than one step."""
        if min(rows, chunk_len, seq_len) < 1 or seq_len % chunk_len:
            raise ConfigError(
                f"rows ({rows}) must be at least 1, seq_len ({seq_len}) a multiple of chunk_len ({chunk_len})"
            )
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank must be in [0, {world_size}), got {rank}")
        self._split, self._seed = split, seed
        self._chunk_len, self._chunks_per_segment = chunk_len, seq_len // chunk_len
        self._row_ids = rank * rows + np.arange(rows)
        self._num_chunks = -(-np.diff(split.offsets) // chunk_len)  # per document, rounded up
        self.tokens_per_step: int = rows * world_size * seq_len  # positions of all ranks, padding included
        self.steps_per_epoch: int = int(self._num_chunks.sum()) * chunk_len // self.tokens_per_step
        if not self.steps_per_epoch:
            raise ConfigError(
                f"the {split.name} split is too small: one step reads {self.tokens_per_step} tokens "
                f"(rows x ranks x seq_len), and it has {len(split.ids) - 1}"
            )
        self._layout = self._lay_out(0)

    def batch(self, step: int) -> Batch:
        """The batch of global step `step` (from 0; epochs follow one another) for this rank."""
        epoch, segment = divmod(step, self.steps_per_epoch)
        if self._layout.epoch != epoch:
            self._layout = self._lay_out(epoch)
        chunks = self._chunks_of(segment)
        number = np.searchsorted(self._layout.first_chunks, chunks, side="right") - 1
        chunk_in_document = chunks - self._layout.first_chunks[number]
        reset = chunk_in_document == 0
        if segment == 0:
            reset[:, 0] = True
        return self._gather(self._layout.order[number], chunk_in_document, reset)

    def _chunks_of(self, segment: int) -> IntArray:
        """[rows, chunks per segment]: places in the virtual stream."""
        first_segments = self._row_ids * self.steps_per_epoch + segment
        chunks: IntArray = first_segments[:, None] * self._chunks_per_segment + np.arange(self._chunks_per_segment)
        return chunks

    def _gather(self, document: IntArray, chunk_in_document: IntArray, reset: npt.NDArray[np.bool_]) -> Batch:
        """document, chunk_in_document, reset: [rows, chunks per segment]."""
        starts = self._split.offsets[document] + chunk_in_document * self._chunk_len
        index = (starts[:, :, None] + np.arange(self._chunk_len)).reshape(len(starts), -1)
        ends = np.repeat(self._split.offsets[document + 1], self._chunk_len, axis=1)
        valid = index < ends
        end_of_text = len(self._split.ids) - 1  # the last element, which padding points at
        ids = self._split.ids[np.where(valid, index, end_of_text)].astype(np.int64)
        targets = self._split.ids[np.where(valid, index + 1, end_of_text)].astype(np.int64)
        targets[~valid] = IGNORED_TARGET
        weights = turns = None
        if self._split.weights is not None:
            weights = self._split.weights[np.where(valid, index + 1, end_of_text)]
            is_silent = weights == 0
            if self._split.turns is not None:
                turns = self._split.turns[np.where(valid, index + 1, end_of_text)].astype(np.int64)
                is_silent &= turns == 0
            targets[is_silent] = IGNORED_TARGET
        return Batch(
            ids=torch.from_numpy(ids),
            targets=torch.from_numpy(targets),
            valid=torch.from_numpy(valid),
            reset=torch.from_numpy(reset),
            has_inner_starts=bool(reset[:, 1:].any()),
            weights=None if weights is None else torch.from_numpy(weights),
            turns=None if turns is None else torch.from_numpy(turns),
        )

    def _lay_out(self, epoch: int) -> _Layout:
        order = document_order(self._seed, epoch, self._split.num_documents)
        lengths = self._num_chunks[order]
        return _Layout(epoch, order, np.cumsum(lengths) - lengths)
