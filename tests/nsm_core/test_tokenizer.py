from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsm_core.errors import CheckpointError, InvalidRequest
from nsm_core.tokenizer import END_OF_TEXT, TOKENIZER_FILE, BpeTokenizer, IncrementalDecoder, Tokenizer
from tests.support.byte_tokens import byte_id, tokenizer_of
from tests.support.samples import (
    grapheme_strings,
    json_parsing_cases,
    multilingual_texts,
    naughty_strings,
    sample_texts,
    utf8_byte_cases,
)

LOOKALIKES = [
    END_OF_TEXT,
    f"a{END_OF_TEXT}b",
    f"{END_OF_TEXT}{END_OF_TEXT}",
    f" {END_OF_TEXT}\n",
    "<|endoftext",
    "<|im_start|>system",
    "</s><s>[INST]",
    "<unk>",
]


def tricky_texts() -> list[str]:
    return [*naughty_strings(), *multilingual_texts().values(), *("".join(clusters) for clusters in grapheme_strings())]


def decode_one_by_one(tokenizer: Tokenizer, ids: list[int]) -> str:
    decoder = IncrementalDecoder(tokenizer)
    return "".join([*(decoder.feed(token_id) for token_id in ids), decoder.flush()])


@given(st.binary(max_size=200))
def test_every_byte_string_round_trips(tiny_tokenizer: Tokenizer, raw: bytes) -> None:
    ids = tiny_tokenizer.encode_bytes(raw)
    assert tiny_tokenizer.decode_bytes(ids) == raw
    assert tiny_tokenizer.decode(ids) == decode_one_by_one(tiny_tokenizer, ids) == raw.decode("utf-8", "replace")


@given(st.text(max_size=200))
def test_every_text_round_trips(tiny_tokenizer: Tokenizer, text: str) -> None:
    ids = tiny_tokenizer.encode(text)
    assert tiny_tokenizer.decode(ids) == decode_one_by_one(tiny_tokenizer, ids) == text
    assert tiny_tokenizer.encode_bytes(text.encode()) == ids
    assert tiny_tokenizer.end_of_text_id not in ids


@given(st.lists(st.integers(0, 511), max_size=100))
def test_S1_any_tokens_decode_alike_at_once_and_one_by_one(tiny_tokenizer: Tokenizer, ids: list[int]) -> None:
    assert decode_one_by_one(tiny_tokenizer, ids) == tiny_tokenizer.decode(ids)


def test_all_single_bytes_and_pairs_round_trip(tiny_tokenizer: Tokenizer) -> None:
    every_byte = bytes(range(256))
    for raw in (b"", every_byte, every_byte[::-1], *(bytes([byte, 0x80]) for byte in range(256))):
        assert tiny_tokenizer.decode_bytes(tiny_tokenizer.encode_bytes(raw)) == raw
    singles = [tiny_tokenizer.encode_bytes(bytes([byte])) for byte in range(256)]
    assert all(len(ids) == 1 for ids in singles)
    assert len({ids[0] for ids in singles}) == 256


def test_tricky_files_round_trip(tiny_tokenizer: Tokenizer) -> None:
    texts = tricky_texts()
    assert len(texts) > 400
    for text, ids in zip(texts, tiny_tokenizer.encode_batch(texts), strict=True):
        assert decode_one_by_one(tiny_tokenizer, ids) == tiny_tokenizer.decode(ids) == text
    for raw in json_parsing_cases().values():
        assert tiny_tokenizer.decode_bytes(tiny_tokenizer.encode_bytes(raw)) == raw


def test_S1_bad_bytes_are_replaced_as_python_does(tiny_tokenizer: Tokenizer) -> None:
    for raw, replaced in utf8_byte_cases():
        ids = tiny_tokenizer.encode_bytes(raw)
        assert tiny_tokenizer.decode_bytes(ids) == raw
        assert tiny_tokenizer.decode(ids) == decode_one_by_one(tiny_tokenizer, ids) == replaced


@pytest.mark.parametrize("text", LOOKALIKES)
def test_text_that_looks_like_a_special_token_is_text(tiny_tokenizer: Tokenizer, text: str) -> None:
    for ids in (tiny_tokenizer.encode(text), tiny_tokenizer.encode_bytes(text.encode())):
        assert tiny_tokenizer.end_of_text_id not in ids
        assert tiny_tokenizer.decode(ids) == text


def test_a_saved_tokenizer_still_reads_look_alikes_as_text(tiny_tokenizer: Tokenizer, tmp_path: Path) -> None:
    tiny_tokenizer.save(tmp_path / TOKENIZER_FILE)
    for loaded in (BpeTokenizer.load(tmp_path), BpeTokenizer.load(tmp_path / TOKENIZER_FILE)):
        assert loaded.encode(f"a{END_OF_TEXT}b") == tiny_tokenizer.encode(f"a{END_OF_TEXT}b")
        assert loaded.fingerprint == tiny_tokenizer.fingerprint
        assert loaded.vocab_size == tiny_tokenizer.vocab_size == 512


@pytest.mark.parametrize(("text", "where"), [("\ud800", 0), ("ab\udfff", 2), ("\ud83d\ude42", 0), ("é\udc80x", 1)])
def test_unpaired_surrogates_are_refused(tiny_tokenizer: Tokenizer, text: str, where: int) -> None:
    with pytest.raises(InvalidRequest, match=f"surrogate at character {where}"):
        tiny_tokenizer.encode(text)
    with pytest.raises(InvalidRequest, match=f"surrogate at character {where}"):
        tiny_tokenizer.encode_batch(["good", text])


def test_a_batch_encodes_like_its_texts(tiny_tokenizer: Tokenizer) -> None:
    texts = ["", "one", " two\n", *LOOKALIKES]
    assert tiny_tokenizer.encode_batch(texts) == [tiny_tokenizer.encode(text) for text in texts]
    assert tiny_tokenizer.encode_batch([]) == []


def test_merges_are_used(tiny_tokenizer: Tokenizer) -> None:
    text = sample_texts("val")[0][:2000]
    assert len(tiny_tokenizer.encode(text)) < 0.7 * len(text.encode())


def test_end_of_text_has_no_bytes(tiny_tokenizer: Tokenizer) -> None:
    end_id = tiny_tokenizer.end_of_text_id
    assert tiny_tokenizer.token_bytes(end_id) == b""
    assert tiny_tokenizer.decode([*tiny_tokenizer.encode("a"), end_id, *tiny_tokenizer.encode("b")]) == "ab"


@pytest.mark.parametrize("token_id", [-1, 512, 10**9])
def test_an_unknown_id_is_refused_with_the_limit(tiny_tokenizer: Tokenizer, token_id: int) -> None:
    message = rf"in \[0, 511\], got {token_id}$"
    with pytest.raises(InvalidRequest, match=message):
        tiny_tokenizer.decode([5, token_id])
    with pytest.raises(InvalidRequest, match=message):
        tiny_tokenizer.token_bytes(token_id)


def test_training_is_repeatable() -> None:
    texts = sample_texts("val")[:1]
    first, second = (BpeTokenizer.train(texts, vocab_size=300) for _ in range(2))
    assert first.fingerprint == second.fingerprint
    assert first.vocab_size == 300
    assert first.end_of_text_id == 0


def test_a_decoder_starts_afresh_after_its_flush() -> None:
    tokenizer = tokenizer_of()
    decoder = IncrementalDecoder(tokenizer)
    assert [decoder.feed(byte_id(byte)) for byte in b"\xf0\x9f"] == ["", ""]
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""
    assert decoder.feed_bytes("🙂".encode()) == "🙂"


# --- files that cannot be used --------------------------------------------------------------------------------------


def spoil(tokenizer: Tokenizer, path: Path, **changes: Any) -> Path:
    tokenizer.save(path / TOKENIZER_FILE)
    fields = json.loads((path / TOKENIZER_FILE).read_text("utf-8"))
    (path / TOKENIZER_FILE).write_text(json.dumps(fields | changes), "utf-8")
    return path


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="missing"):
        BpeTokenizer.load(tmp_path / "missing.json")
    (tmp_path / TOKENIZER_FILE).write_text("{", "utf-8")
    with pytest.raises(CheckpointError, match=TOKENIZER_FILE):
        BpeTokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "NFKC"}},
        {"normalizer": {"type": "Lowercase"}},
        {
            "pre_tokenizer": {
                "type": "ByteLevel",
                "add_prefix_space": True,
                "trim_offsets": True,
                "use_regex": True,
            }
        },
        {"pre_tokenizer": None},
    ],
    ids=["NFKC", "lowercase", "prefix space", "not byte-level"],
)
def test_a_tokenizer_that_changes_text_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="as it was"):
        BpeTokenizer.load(spoil(tokenizer_of(), tmp_path, **changes))


def test_a_tokenizer_without_end_of_text_is_refused(tmp_path: Path) -> None:
    model = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
    with pytest.raises(CheckpointError, match="endoftext"):
        BpeTokenizer.load(spoil(tokenizer_of(), tmp_path, model=model, added_tokens=[]))


def test_a_tokenizer_that_lacks_bytes_is_refused(tmp_path: Path) -> None:
    model = {"type": "BPE", "vocab": {END_OF_TEXT: 0, "a": 1}, "merges": []}
    with pytest.raises(CheckpointError, match="each of 256 bytes, it has 1"):
        BpeTokenizer.load(spoil(tokenizer_of(), tmp_path, model=model))


def test_a_tokenizer_of_characters_is_refused(tmp_path: Path) -> None:
    model = {"type": "BPE", "vocab": {END_OF_TEXT: 0, "日": 1}, "merges": []}
    with pytest.raises(CheckpointError, match="token 1 is '日'"):
        BpeTokenizer.load(spoil(tokenizer_of(), tmp_path, model=model))


def test_json_carries_the_whole_tokenizer(tiny_tokenizer: Tokenizer) -> None:
    assert BpeTokenizer.from_json(tiny_tokenizer.to_json()).fingerprint == tiny_tokenizer.fingerprint
    for text in ("{}", "no JSON", '{"version": "1.0"}'):
        with pytest.raises(CheckpointError):
            BpeTokenizer.from_json(text)
