from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsm_core import world_tokenizer as module
from nsm_core.errors import CheckpointError, InvalidRequest
from nsm_core.tokenizer import BpeTokenizer, IncrementalDecoder, Tokenizer
from nsm_core.tokenizer_files import load_tokenizer, tokenizer_from_json
from nsm_core.world_tokenizer import VOCABULARY_FILE, WorldTokenizer, find_vocabulary, tokens_of_literals
from tests.support.samples import multilingual_texts, naughty_strings, sample_texts
from tests.support.world_vocabulary import world_tokenizer, world_tokens

SMALL = world_tokenizer()
RAW = st.lists(st.sampled_from([*world_tokens().values()]), max_size=40).map(b"".join) | st.binary(max_size=200)


@pytest.fixture(scope="module")
def published() -> WorldTokenizer:
    """The vocabulary that RWKV-7 models share, out of an installed package."""
    spec = importlib.util.find_spec("pyrwkv_tokenizer")
    assert spec is not None
    (folder,) = spec.submodule_search_locations or ()
    return WorldTokenizer.read(Path(folder) / VOCABULARY_FILE, vocab_size=65536)


def longest_matches(raw: bytes) -> list[int]:
    """By definition, and slowly."""
    by_length = sorted(world_tokens().items(), key=lambda item: -len(item[1]))
    ids = []
    while raw:
        token_id, token = next(item for item in by_length if raw.startswith(item[1]))
        ids.append(token_id)
        raw = raw[len(token) :]
    return ids


@given(RAW)
def test_any_bytes_become_the_longest_tokens_and_come_back(raw: bytes) -> None:
    ids = SMALL.encode_bytes(raw)
    assert ids == longest_matches(raw)
    assert SMALL.decode_bytes(ids) == raw


@given(RAW)
def test_bytes_that_are_no_whole_characters_decode_alike_one_by_one(raw: bytes) -> None:
    ids, decoder = SMALL.encode_bytes(raw), IncrementalDecoder(SMALL)
    assert "".join([*map(decoder.feed, ids), decoder.flush()]) == SMALL.decode(ids) == raw.decode("utf-8", "replace")


@given(st.text(max_size=200))
def test_every_text_round_trips(text: str) -> None:
    assert SMALL.decode(SMALL.encode(text)) == text
    assert SMALL.encode(text) == SMALL.encode_bytes(text.encode())


def test_an_unpaired_surrogate_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="unpaired surrogate at character 1"):
        SMALL.encode("a\ud800")


def test_id_0_ends_a_text_and_ids_without_a_token_are_no_bytes() -> None:
    padded = world_tokenizer(vocab_size=1024)
    assert (padded.end_of_text_id, padded.vocab_size) == (0, 1024)
    assert padded.token_bytes(0) == padded.token_bytes(1023) == b""
    assert padded.fingerprint != SMALL.fingerprint


def test_file_and_json_give_the_same_tokenizer(tmp_path: Path) -> None:
    SMALL.save(tmp_path / VOCABULARY_FILE)
    assert "\r" not in (tmp_path / VOCABULARY_FILE).read_text("utf-8")
    read = load_tokenizer(tmp_path)
    assert read.fingerprint == tokenizer_from_json(SMALL.to_json()).fingerprint == SMALL.fingerprint


def test_a_tokenizer_json_wins_over_a_vocabulary(tmp_path: Path, tiny_tokenizer: Tokenizer) -> None:
    SMALL.save(tmp_path / VOCABULARY_FILE)
    tiny_tokenizer.save(tmp_path / "tokenizer.json")
    assert isinstance(load_tokenizer(tmp_path), BpeTokenizer)
    assert tokenizer_from_json(tiny_tokenizer.to_json()).fingerprint == tiny_tokenizer.fingerprint


def test_without_a_vocabulary_the_message_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "VOCABULARY_PACKAGES", ("no_such_package",))
    with pytest.raises(CheckpointError, match=rf"put {VOCABULARY_FILE} or tokenizer.json .*pip install"):
        find_vocabulary(tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "x 'a' 1",
        "1 'a' 2",
        "1 'a'",
        "1 a 1",
        "1 __import__('os') 1",
        "1 'a' + 'b' 2",
        "1 '\\N{BULLET}' 3",
        "1 '\\d' 2",
        "1 'a' 1\n1 'b' 1",
        "1 'a' 1\n2 'a' 1",
        "1 '' 0",
        "0 'a' 1",
        "9999999 'a' 1",
        "1 'a' 1",  # one byte of 256
        "1 '\\ud800' 3",
        "1 '\\x",
        "1 b'\u00e9' 2",
    ],
)
def test_a_damaged_vocabulary_is_refused_in_one_line(tmp_path: Path, line: str) -> None:
    file = tmp_path / VOCABULARY_FILE
    file.write_text(line, "utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CheckpointError) as refused:
            WorldTokenizer.read(file)
    assert str(file) in str(refused.value)
    assert "\n" not in str(refused.value)


@given(st.binary(max_size=300) | st.text("1 'b\\xu\"\n", max_size=80).map(str.encode))
def test_any_bytes_as_a_vocabulary_are_refused(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "fuzzed.txt"
    file.write_bytes(raw)
    with pytest.raises(CheckpointError):
        WorldTokenizer.read(file)


@pytest.mark.parametrize(
    "text", ["{}", "[", '{"kind": "rwkv-world"}', '{"kind": "rwkv-world", "tokens": [1]}', "[" * 9999]
)
def test_json_that_is_no_tokenizer_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError):
        WorldTokenizer.from_json(text)


def test_tokens_of_a_gguf_file_are_unescaped() -> None:
    raw = [b"<s>", b"\n\n", b"'", b'"', b"'\"", b"\\x41", "é".encode(), b"\xff\x00", b"\\"]
    literals = [repr(token)[2:-1].encode() for token in raw]
    assert tokens_of_literals(literals) == dict(enumerate(raw))


def test_the_published_vocabulary_encodes_as_its_reference_does(published: WorldTokenizer) -> None:
    import pyrwkv_tokenizer

    reference = pyrwkv_tokenizer.RWKVTokenizer()
    assert published.vocab_size == 65536
    for text in [*sample_texts("train")[:20], *multilingual_texts().values(), *naughty_strings()]:
        assert published.encode(text) == list(reference.encode(text)), text[:80]


def test_the_published_vocabulary_is_written_as_it_was_read(published: WorldTokenizer, tmp_path: Path) -> None:
    published.save(tmp_path / VOCABULARY_FILE)
    spec = importlib.util.find_spec("pyrwkv_tokenizer")
    assert spec is not None
    (folder,) = spec.submodule_search_locations or ()
    assert (tmp_path / VOCABULARY_FILE).read_bytes() == (Path(folder) / VOCABULARY_FILE).read_bytes()
