from __future__ import annotations

import json
from pathlib import Path

import pytest
import zstandard

from nsm_core.errors import ConfigError
from nsm_lab.training.data_files import corpus_files, read_documents


def line(text: str, **fields: object) -> bytes:
    return json.dumps({"text": text, **fields}, ensure_ascii=False).encode("utf-8") + b"\n"


def texts(directory: Path, split: str = "train") -> list[str]:
    return [document.text for document in read_documents(directory, split)]  # type: ignore[arg-type]


def test_files_of_a_split_are_found_by_name_and_sorted(tmp_path: Path) -> None:
    names = ["a-train-01.jsonl.zst", "a-train-00.jsonl", "b-train.jsonl.zst", "a-val.jsonl", "c-test.jsonl.zst"]
    for name in [*names, "index.tsv", "training.jsonl", "train.txt", "a-train-00.jsonl.bak"]:
        (tmp_path / name).touch()
    (tmp_path / "nested-train.jsonl").mkdir()
    assert [p.name for p in corpus_files(tmp_path, "train")] == [
        "a-train-00.jsonl",
        "a-train-01.jsonl.zst",
        "b-train.jsonl.zst",
    ]
    assert [p.name for p in corpus_files(tmp_path, "val")] == ["a-val.jsonl"]
    assert [p.name for p in corpus_files(tmp_path, "test")] == ["c-test.jsonl.zst"]


def test_documents_come_in_order_with_their_fields(tmp_path: Path) -> None:
    shard = line("one", id="x", title="One", author="A", year=-5) + line("two", id=7) + line("three")
    (tmp_path / "b-train-00.jsonl.zst").write_bytes(zstandard.compress(shard))
    (tmp_path / "b-train-01.jsonl").write_bytes(line("four"))
    documents = list(read_documents(tmp_path, "train"))
    assert [d.text for d in documents] == ["one", "two", "three", "four"]
    assert [d.id for d in documents] == ["x", "7", "b-train-00.jsonl.zst:3", "b-train-01.jsonl:1"]
    assert (documents[0].title, documents[0].author, documents[1].title) == ("One", "A", "")


def test_lines_end_at_newline_only_and_blank_lines_are_skipped(tmp_path: Path) -> None:
    odd = "a\u2028b\u0085c\u2029d\x0be"
    raw = json.dumps({"text": odd}, ensure_ascii=False).encode() + b"\r\n\n  \n" + line("last")[:-1]
    (tmp_path / "o-val.jsonl").write_bytes(raw)
    assert texts(tmp_path, "val") == [odd, "last"]


@pytest.mark.parametrize("read_bytes", [1, 3, 1 << 18])
def test_any_block_size_gives_the_same_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_bytes: int) -> None:
    monkeypatch.setattr("nsm_lab.training.data_files._READ_BYTES", read_bytes)
    (tmp_path / "a-train.jsonl.zst").write_bytes(zstandard.compress(line("é" * 50) + line("") + line("z")))
    (tmp_path / "b-train.jsonl").write_bytes(line("plain\nnewline inside"))
    assert texts(tmp_path) == ["é" * 50, "", "z", "plain\nnewline inside"]


def test_several_frames_and_a_wide_window_are_read(tmp_path: Path) -> None:
    wide = zstandard.ZstdCompressionParameters(window_log=26)
    frames = zstandard.ZstdCompressor(compression_params=wide).compressobj()
    first = frames.compress(line("wide window")) + frames.flush()
    assert zstandard.get_frame_parameters(first).window_size == 64 << 20
    (tmp_path / "a-train.jsonl.zst").write_bytes(first + zstandard.compress(line("second frame")))
    assert texts(tmp_path) == ["wide window", "second frame"]


def test_progress_counts_the_stored_bytes(tmp_path: Path) -> None:
    (tmp_path / "a-train.jsonl.zst").write_bytes(zstandard.compress(line("x" * 999)))
    (tmp_path / "b-train.jsonl").write_bytes(line("y"))
    counts: list[int] = []
    list(read_documents(tmp_path, "train", on_bytes=counts.append))
    assert sum(counts) == sum(path.stat().st_size for path in tmp_path.iterdir())


def test_a_missing_directory_and_a_missing_split_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere does not exist"):
        corpus_files(tmp_path / "nowhere", "train")
    (tmp_path / "a-train.jsonl").touch()
    with pytest.raises(ConfigError, match=r"no test files in .*NAME-test\.jsonl\.zst"):
        corpus_files(tmp_path, "test")


def test_a_shard_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a-train.jsonl").touch()
    (tmp_path / "a-train.jsonl.zst").touch()
    with pytest.raises(ConfigError, match=r"both a-train\.jsonl and a-train\.jsonl\.zst"):
        corpus_files(tmp_path, "train")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b"{not json}\n", "not JSON"),
        (b"[1, 2]\n", "string field 'text'"),
        (b'{"title": "no text"}\n', "string field 'text'"),
        (b'{"text": 5}\n', "string field 'text'"),
        (b'{"text": "\xff\xfe"}\n', "not JSON"),
        (b'{"text": "a\\ud800"}\n', "unpaired surrogate at character 1"),
        (b"[" * 100_000 + b"\n", "not JSON"),
    ],
    ids=["syntax", "array", "no-text", "number", "utf8", "surrogate", "deep"],
)
def test_a_bad_line_is_named_by_file_and_line(tmp_path: Path, bad: bytes, message: str) -> None:
    (tmp_path / "a-train.jsonl.zst").write_bytes(zstandard.compress(line("fine") + b"\n" + bad))
    with pytest.raises(ConfigError, match=rf"a-train\.jsonl\.zst, line 3: .*{message}"):
        texts(tmp_path)


@pytest.mark.parametrize("keep", [0.5, 0.99], ids=["half", "tail"])
def test_a_cut_file_is_an_error_and_not_a_shorter_corpus(tmp_path: Path, keep: float) -> None:
    whole = zstandard.compress(b"".join(line(f"text {i}") for i in range(2000)))
    (tmp_path / "a-train.jsonl.zst").write_bytes(whole[: int(len(whole) * keep)])
    with pytest.raises(ConfigError, match=r"cannot read .*a-train\.jsonl\.zst: .*middle of a Zstandard frame"):
        texts(tmp_path)


def test_a_file_that_is_not_zstandard_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a-train.jsonl.zst").write_bytes(line("plain text under a wrong name"))
    with pytest.raises(ConfigError, match=r"cannot read .*a-train\.jsonl\.zst"):
        texts(tmp_path)
