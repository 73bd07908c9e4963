"""The bundled test data of `data/`, ready to iterate over."""

from __future__ import annotations

import base64
import gzip
import io
import json
import tarfile
from pathlib import Path

import zstandard

from nsm_lab.training.data_files import Split, read_documents

DATA_DIR = Path(__file__).resolve().parents[2] / "data"
BOOKS_DIR = DATA_DIR / "books-sample"
TRICKY_DIR = DATA_DIR / "tricky"
TASKS_DIR = DATA_DIR / "public-tasks"


def sample_texts(split: Split) -> list[str]:
    """Book excerpts of 30,000 to 50,000 characters."""
    return [document.text for document in read_documents(BOOKS_DIR, split)]


def utf8_byte_cases() -> list[tuple[bytes, str]]:
    """79 byte strings, 72 of them not valid UTF-8, each with what Python decodes it to with errors="replace"."""
    lines = (TRICKY_DIR / "utf8-byte-cases.jsonl").read_text("utf-8").split("\n")
    cases = [json.loads(line) for line in lines if line]
    return [(base64.b64decode(case["b64"]), case["replaced"]) for case in cases]


def naughty_strings() -> list[str]:
    """361 strings that programs have stumbled over."""
    strings: list[str] = json.loads((TRICKY_DIR / "blns-part.json").read_text("utf-8"))
    return strings


def multilingual_texts() -> dict[str, str]:
    """The Universal Declaration of Human Rights by language code: 50 languages, 25 scripts."""
    rows = [json.loads(line) for line in _unpacked("udhr-multilingual.jsonl.zst").decode("utf-8").split("\n") if line]
    return {row["lang"]: "\n".join(row["lines"]) for row in rows}


def grapheme_strings() -> list[list[str]]:
    """Unicode's grapheme tests: each string as the list of its clusters (combining marks, emoji, flags, jamo)."""
    lines = _unpacked("GraphemeBreakTest.txt.zst").decode("utf-8").split("\n")
    samples = (line.partition("#")[0].strip(" \t÷") for line in lines)
    return [[_characters(cluster) for cluster in sample.split("÷")] for sample in samples if sample]


def json_parsing_cases() -> dict[str, bytes]:
    """318 JSON texts by file name: `y_` must parse, `n_` must be refused, `i_` either."""
    with tarfile.open(fileobj=io.BytesIO(_unpacked("json_test_parsing.tar.zst"))) as archive:
        members = {Path(member.name).name: archive.extractfile(member) for member in archive if member.isfile()}
    return {name: file.read() for name, file in members.items() if file is not None}


def listops_lines() -> list[tuple[str, str]]:
    """100 published ListOps expressions: answer and source."""
    lines = (TASKS_DIR / "listops-part.tsv").read_text("utf-8").splitlines()
    return [(answer, source) for answer, source in (line.split("\t") for line in lines)]


def babi_text(task: int) -> str:
    """The first stories of bAbI's test file of task 1 or 2."""
    return (TASKS_DIR / f"babi-qa{task}-part.txt").read_text("utf-8")


def shakespeare_text() -> str:
    """All of Tiny Shakespeare."""
    return gzip.decompress((DATA_DIR / "tinyshakespeare" / "input.txt.gz").read_bytes()).decode("utf-8")


def _characters(cluster: str) -> str:
    return "".join(chr(int(code, 16)) for code in cluster.replace("×", " ").split())


def _unpacked(name: str) -> bytes:
    with (TRICKY_DIR / name).open("rb") as file:
        return zstandard.ZstdDecompressor().stream_reader(file).read()
