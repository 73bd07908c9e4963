"""Reads a text corpus: JSON lines, plain or Zstandard-compressed, one document a line, in files named by split."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import zstandard

from nsm_core.errors import ConfigError, reason_of

Split = Literal["train", "val", "test"]

SPLITS: tuple[Split, ...] = get_args(Split)
_SUFFIXES = (".jsonl", ".jsonl.zst")
_READ_BYTES = 1 << 18
# Above the 64 MiB a long-range frame may ask for; `zstd --ultra -22` makes windows of this size.
_MAX_WINDOW_BYTES = 1 << 27


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One text of a corpus. `id` falls back to "file:line" where the line has none."""

    id: str
    text: str
    title: str = ""
    author: str = ""


def corpus_files(data_dir: Path, split: Split) -> list[Path]:
    """Files of `split` directly in `data_dir`, sorted by name. Raises ConfigError when there are none.

    The split of `books-train-00.jsonl.zst` is the last part of the name, between hyphens, that is train, val or test.
    """
    if not data_dir.is_dir():
        raise ConfigError(f"the data directory {data_dir} does not exist or is not a directory")
    files = sorted(path for path in data_dir.iterdir() if _split_of(path.name) == split and path.is_file())
    if not files:
        raise ConfigError(
            f"no {split} files in {data_dir}: expected names like NAME-{split}.jsonl.zst or NAME-{split}.jsonl"
        )
    names = {path.name for path in files}
    for name in sorted(names):
        if f"{name}.zst" in names:
            raise ConfigError(f"{data_dir} holds both {name} and {name}.zst: remove one, or its text counts twice")
    return files


def read_documents(
    data_dir: Path, split: Split, *, on_bytes: Callable[[int], object] = lambda num_bytes: None
) -> Iterator[Document]:
    """Documents of all files of `split`, file by file, without holding a file in memory.

    `on_bytes` gets the number of stored (compressed) bytes after each read. Raises ConfigError, with file
    and line, for a line that is not a JSON object with a string `text`.
    """
    for path in corpus_files(data_dir, split):
        yield from _read_file(path, on_bytes)


def _split_of(name: str) -> str | None:
    stem = next((name.removesuffix(suffix) for suffix in reversed(_SUFFIXES) if name.endswith(suffix)), "")
    return next((part for part in reversed(stem.split("-")) if part in SPLITS), None)


def _read_file(path: Path, on_bytes: Callable[[int], object]) -> Iterator[Document]:
    for number, line in enumerate(_lines(_blocks(path, on_bytes)), start=1):
        if line.strip():
            yield _parse(line, path, number)


def _parse(line: bytes, path: Path, number: int) -> Document:
    where = f"{path}, line {number}"
    try:
        fields: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON ({error})") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("text"), str):
        raise ConfigError(f"{where}: expected a JSON object with a string field 'text'")
    text = fields["text"]
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ConfigError(f"{where}: 'text' holds an unpaired surrogate at character {error.start}") from error
    return Document(
        id=str(fields.get("id") or f"{path.name}:{number}"),
        text=text,
        title=str(fields.get("title") or ""),
        author=str(fields.get("author") or ""),
    )


def _lines(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Splits at "\\n" only: U+2028, U+0085 and "\\r" are text."""
    rest: list[bytes] = []
    for block in blocks:
        *complete, last = block.split(b"\n")
        for line in complete:
            yield b"".join((*rest, line))
            rest.clear()
        rest.append(last)
    if any(rest):
        yield b"".join(rest)


def _blocks(path: Path, on_bytes: Callable[[int], object]) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            raw = iter(lambda: file.read(_READ_BYTES), b"")
            yield from _decompress(raw, on_bytes) if path.suffix == ".zst" else _counted(raw, on_bytes)
    except (OSError, EOFError, zstandard.ZstdError) as error:
        raise ConfigError(f"cannot read {path}: {reason_of(error)}") from error


def _counted(raw: Iterator[bytes], on_bytes: Callable[[int], object]) -> Iterator[bytes]:
    for block in raw:
        on_bytes(len(block))
        yield block


def _decompress(raw: Iterator[bytes], on_bytes: Callable[[int], object]) -> Iterator[bytes]:
    """Any number of frames in a row. A cut file is an error: the library's own reader would end as if it were whole."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
    frame = None
    for block in _counted(raw, on_bytes):
        while block:
            frame = frame or decompressor.decompressobj()
            yield frame.decompress(block)
            block, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame is not None:
        raise EOFError("the file ends in the middle of a Zstandard frame")
