from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsm_core.errors import ConfigError
from nsm_core.tokenizer import BpeTokenizer, Tokenizer
from nsm_lab.training.data import Batch, PackedBatches, TokenizedSplit, tokenize_split
from tests.nsm_lab.training.conftest import WriteCorpus, make_texts

END = 0


def make_split(lengths: list[int]) -> TokenizedSplit:
    """Every text token is unique, so that a test can tell where each one went."""
    parts, next_id = [], 1
    for length in lengths:
        parts.append([END, *range(next_id, next_id + length)])
        next_id += length
    ids = np.array([*(token for part in parts for token in part), END], np.uint32)
    offsets = np.cumsum([0, *map(len, parts)])
    return TokenizedSplit(name="train", ids=ids, offsets=offsets, num_bytes=0, num_words=0)


# --- tokenize_split


def test_the_split_holds_every_document_and_its_counts(
    write_corpus: WriteCorpus, tiny_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    texts = ["the old sea", "", "naïve — 船 home\u2028under", "<|endoftext|>"]
    split = tokenize_split(write_corpus("x-train-00.jsonl.zst", texts), "train", tiny_tokenizer, tmp_path / "cache")
    end = tiny_tokenizer.end_of_text_id
    want = [[end, *tiny_tokenizer.encode(text)] for text in texts]
    got = [split.ids[a:b].tolist() for a, b in zip(split.offsets[:-1], split.offsets[1:], strict=True)]
    assert got == want
    assert split.ids[-1] == end
    assert len(split.ids) == split.offsets[-1] + 1
    assert split.ids.dtype == np.uint16
    assert split.num_documents == 4
    assert split.num_tokens == sum(len(ids) - 1 for ids in want)
    assert split.num_bytes == sum(len(text.encode()) for text in texts)
    assert split.num_words == sum(len(text.split()) for text in texts)


def test_the_second_call_maps_the_cache_without_encoding(
    write_corpus: WriteCorpus, tiny_tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_dir = write_corpus("x-val.jsonl.zst", make_texts(9, max_words=40))
    first = tokenize_split(data_dir, "val", tiny_tokenizer, tmp_path / "cache")
    monkeypatch.setattr(Tokenizer, "encode_batch", None)
    second = tokenize_split(data_dir, "val", tiny_tokenizer, tmp_path / "cache")
    assert isinstance(second.ids, np.memmap)
    assert not second.ids.flags.writeable
    assert second.ids.tolist() == first.ids.tolist()
    assert second.offsets.tolist() == first.offsets.tolist()
    assert (second.num_bytes, second.num_words) == (first.num_bytes, first.num_words)


def test_the_cache_follows_contents_and_tokenizer(
    write_corpus: WriteCorpus, tiny_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    data_dir = write_corpus("x-train.jsonl.zst", ["one text"])
    before = tokenize_split(data_dir, "train", tiny_tokenizer, cache)
    write_corpus("x-train.jsonl.zst", ["two text"])
    after = tokenize_split(data_dir, "train", tiny_tokenizer, cache)
    assert before.ids.tolist() != after.ids.tolist()
    other = BpeTokenizer.train(["two text"], vocab_size=260)
    assert tokenize_split(data_dir, "train", other, cache).ids[1:-1].tolist() == other.encode("two text")
    assert len(list(cache.iterdir())) == 3


def test_small_encode_batches_change_nothing(
    write_corpus: WriteCorpus, tiny_tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_dir = write_corpus("x-train.jsonl.zst", make_texts(12, max_words=30))
    want = tokenize_split(data_dir, "train", tiny_tokenizer, tmp_path / "a")
    monkeypatch.setattr("nsm_lab.training.data._BATCH_CHARS", 50)
    got = tokenize_split(data_dir, "train", tiny_tokenizer, tmp_path / "b")
    assert got.ids.tolist() == want.ids.tolist()
    assert got.num_words == want.num_words


def test_a_failed_run_leaves_nothing_behind(
    write_corpus: WriteCorpus, tiny_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    data_dir = write_corpus("x-train-00.jsonl.zst", ["fine"])
    (data_dir / "x-train-01.jsonl").write_bytes(b"broken\n")
    with pytest.raises(ConfigError, match=r"x-train-01\.jsonl, line 1"):
        tokenize_split(data_dir, "train", tiny_tokenizer, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_callers_at_once_agree_on_one_entry(
    write_corpus: WriteCorpus, tiny_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    data_dir = write_corpus("x-train.jsonl.zst", make_texts(8, max_words=40))
    results: list[list[int]] = []

    def work() -> None:
        results.append(tokenize_split(data_dir, "train", tiny_tokenizer, tmp_path / "cache").ids.tolist())

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3
    assert results[0] == results[1] == results[2]
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_damaged_cache_is_named(write_corpus: WriteCorpus, tiny_tokenizer: Tokenizer, tmp_path: Path) -> None:
    data_dir = write_corpus("x-train.jsonl.zst", make_texts(5, max_words=40))
    tokenize_split(data_dir, "train", tiny_tokenizer, tmp_path / "cache")
    (entry,) = (tmp_path / "cache").iterdir()
    (entry / "ids.bin").write_bytes((entry / "ids.bin").read_bytes()[:-2])
    with pytest.raises(ConfigError, match=r"token cache .* is damaged .*delete it"):
        tokenize_split(data_dir, "train", tiny_tokenizer, tmp_path / "cache")


# --- PackedBatches

packings = st.fixed_dictionaries(
    {
        "lengths": st.lists(st.integers(0, 90), min_size=1, max_size=12),
        "rows": st.integers(1, 3),
        "world_size": st.integers(1, 2),
        "chunks": st.integers(1, 3),
        "chunk_len": st.sampled_from([1, 4, 16]),
        "seed": st.integers(0, 2**32),
    }
)


def make_ranks(split: TokenizedSplit, case: dict[str, int]) -> list[PackedBatches]:
    seq_len = case["chunks"] * case["chunk_len"]
    return [
        PackedBatches(split, case["rows"], seq_len, case["chunk_len"], case["seed"], rank, case["world_size"])
        for rank in range(case["world_size"])
    ]


def epoch_streams(ranks: list[PackedBatches], epoch: int) -> list[Batch]:
    """For each row of each rank: its whole epoch, step after step, as one long row."""
    streams = []
    for packed in ranks:
        steps = [packed.batch(epoch * packed.steps_per_epoch + s) for s in range(packed.steps_per_epoch)]
        whole = {
            name: torch.cat([getattr(b, name) for b in steps], dim=1) for name in ("ids", "targets", "valid", "reset")
        }
        for row in range(len(whole["ids"])):
            tensors = {name: value[row : row + 1] for name, value in whole.items()}
            streams.append(Batch(**tensors, has_inner_starts=bool(tensors["reset"][:, 1:].any())))
    return streams


def is_too_small(lengths: list[int], case: dict[str, int]) -> bool:
    num_chunks = sum(-(-(length + 1) // case["chunk_len"]) for length in lengths)
    return num_chunks < case["rows"] * case["world_size"] * case["chunks"]


@given(packings)
def test_an_epoch_holds_every_token_once_but_for_a_short_tail(case: dict[str, int]) -> None:
    lengths: list[int] = case.pop("lengths")  # type: ignore[assignment]
    split = make_split(lengths)
    if is_too_small(lengths, case):
        with pytest.raises(ConfigError, match="too small"):
            make_ranks(split, case)
        return
    ranks = make_ranks(split, case)
    tokens_per_step = case["rows"] * case["world_size"] * case["chunks"] * case["chunk_len"]
    assert all(packed.tokens_per_step == tokens_per_step for packed in ranks)
    for epoch in (0, 2):
        streams = epoch_streams(ranks, epoch)
        seen = Counter(torch.cat([s.ids[s.valid] for s in streams]).tolist())
        starts = seen.pop(END, 0)
        assert set(seen.values()) <= {1}
        assert starts <= len(lengths)
        total_positions = sum(-(-(n + 1) // case["chunk_len"]) for n in lengths) * case["chunk_len"]
        left_out = total_positions - sum(s.ids.numel() for s in streams)
        assert 0 <= left_out < tokens_per_step  # less than one segment per row
        assert sum(lengths) + len(lengths) - starts - sum(seen.values()) <= left_out


@given(packings)
def test_targets_stay_in_the_document_and_resets_are_its_starts(case: dict[str, int]) -> None:
    lengths: list[int] = case.pop("lengths")  # type: ignore[assignment]
    split = make_split(lengths)
    if is_too_small(lengths, case):
        return
    document_of = {
        token: i
        for i in range(len(lengths))
        for token in split.ids[split.offsets[i] + 1 : split.offsets[i + 1]].tolist()
    }
    last_tokens = {int(split.ids[end - 1]) for end in split.offsets[1:]}
    for stream in epoch_streams(make_ranks(split, case), 1):
        ids, targets, valid = stream.ids[0], stream.targets[0], stream.valid[0]
        assert (targets[~valid] == -100).all()
        assert (targets[valid] >= 0).all()
        chunk_starts = ids.view(-1, case["chunk_len"])[:, 0] == END
        chunk_starts &= valid.view(-1, case["chunk_len"])[:, 0]
        chunk_starts[0] = True  # every strip begins afresh
        assert stream.reset[0].tolist() == chunk_starts.tolist()
        for token, target in zip(ids[valid].tolist(), targets[valid].tolist(), strict=True):
            if token != END and target != END:
                assert target == token + 1
                assert document_of[target] == document_of[token]
            elif target == END:
                assert token in last_tokens  # only a document's last token ends it
        follows = valid[1:] & valid[:-1]
        assert (ids[1:][follows] == targets[:-1][follows]).all()  # rows read on across steps, targets in step


@given(packings, st.integers(0, 40))
def test_a_step_is_the_same_after_a_restart(case: dict[str, int], step: int) -> None:
    lengths: list[int] = case.pop("lengths")  # type: ignore[assignment]
    split = make_split(lengths)
    if is_too_small(lengths, case):
        return
    walked, fresh = make_ranks(split, case)[-1], make_ranks(split, case)[-1]
    for earlier in range(step):
        walked.batch(earlier)
    got, want = walked.batch(step), fresh.batch(step)
    for name in ("ids", "targets", "valid", "reset"):
        assert torch.equal(getattr(got, name), getattr(want, name))


def test_epochs_and_seeds_have_their_own_order() -> None:
    split = make_split([7] * 40)
    packed = PackedBatches(split, 2, 16, 8, seed=3)
    first = packed.batch(0).ids.tolist()
    assert packed.batch(packed.steps_per_epoch).ids.tolist() != first
    assert PackedBatches(split, 2, 16, 8, seed=4).batch(0).ids.tolist() != first


def test_rows_as_long_as_the_border_hold_one_document_each() -> None:
    split = make_split([500, 3, 250])
    packed = PackedBatches(split, 2, 128, 128, seed=0)
    batches = [packed.batch(step) for step in range(packed.steps_per_epoch)]
    assert not any(batch.has_inner_starts for batch in batches)
    begun = sum(int(batch.reset.sum()) for batch in batches)
    assert begun >= split.num_documents - 1  # the last rows may be left out


def test_shapes_and_dtypes_are_what_the_trainer_expects() -> None:
    batch = PackedBatches(make_split([500, 3, 250]), 3, 128, 64, seed=0).batch(0)
    assert batch.ids.shape == batch.targets.shape == batch.valid.shape == (3, 128)
    assert batch.reset.shape == (3, 2)
    assert (batch.ids.dtype, batch.targets.dtype) == (torch.int64, torch.int64)
    assert (batch.valid.dtype, batch.reset.dtype) == (torch.bool, torch.bool)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seq_len": 100}, "multiple of chunk_len"),
        ({"rows": 0}, "rows"),
        ({"rank": 2, "world_size": 2}, r"rank must be in \[0, 2\)"),
        ({"rows": 64}, r"train split is too small: one step reads 8192 tokens .*, and it has 750"),
    ],
    ids=["ragged", "no-rows", "rank", "too-small"],
)
def test_impossible_sizes_are_refused(arguments: dict[str, int], message: str) -> None:
    sizes = {"rows": 1, "seq_len": 128, "chunk_len": 64, "seed": 0, **arguments}
    with pytest.raises(ConfigError, match=message):
        PackedBatches(make_split([500, 248]), **sizes)
