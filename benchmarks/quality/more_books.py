"""More books to train on: `python -m benchmarks.quality.more_books TEXTS --corpus books --out more-books`.

TEXTS is a directory of `AUTHOR___TITLE.txt`, texts of Project Gutenberg without its header and footer (README.md says
which repository and commit). They are cleaned as the corpus is, and left out where their author wrote a validation or
test book, where they are in the corpus or in each other already, and where an author has more than his share.
`--only LIST.tsv` takes the files of an earlier list instead, as they stand there.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Iterator
from multiprocessing import Pool
from pathlib import Path

import numpy as np
import numpy.typing as npt
import zstandard

from nsm_lab.training.data_files import read_documents

SHINGLE_WORDS, SAMPLED_OF = 6, 41  # one in so many runs of words is compared
MOST_SHARED = 0.3  # of a book's runs that lie in the training split or in a book taken before
MOST_HELD_OUT = 0.01  # of a book's runs that lie in a validation or test book: quotations, and what everybody says
FEWEST_CHARACTERS, MOST_OF_AUTHOR = 20_000, 9_000_000
# Verse, science and speeches for the most part, and two authors who published after 1929.
LEFT_OUT = frozenset((
    "Abraham Lincoln", "Albert Einstein", "Alexander Pope", "Alfred Russel Wallace", "Bertrand Russell",
    "Charles Darwin", "Edmund Burke", "Elizabeth Barrett Browning", "Ezra Pound", "George Washington",
    "Henry Francis Cary", "Herbert Spencer", "Isaac Asimov", "John Dryden", "John Keats", "John Locke",
    "John Maynard Keynes", "John Milton", "John Stuart Mill", "Leigh Hunt", "Lord Byron", "Lord Tennyson",
    "Michael Faraday", "P B Shelley", "Percival Lowell", "Philip Kindred Dick", "Robert Browning", "Robert Burns",
    "Robert Hooke", "Robert Southey", "Samuel Taylor Coleridge", "Sir Francis Galton", "Sir Humphry Davy",
    "Sir Isaac Newton", "Sir Joseph Dalton Hooker", "Sir Richard Francis Burton", "T S Eliot",
    "Thomas Henry Huxley", "Thomas Robert Malthus", "Walt Whitman", "William Blake", "William Ewart Gladstone",
    "William Penn", "William Wordsworth",
))  # fmt: skip
SHARD_BYTES = 120_000_000
PROSE_LINE = 52  # characters: lines of verse are shorter

_NOTES = re.compile(r"\[(?:Illustration|Footnote|Transcriber|Sidenote|Pg|Page|Editor)[^\[\]]*\]|\{\d+\}|\[\d+\]", re.I)
_PLAIN = str.maketrans(
    {
        "\u2018": "'",
        "\u2019": "'",
        "\u201c": '"',
        "\u201d": '"',
        "\u00a0": " ",
        "\u2026": "...",
        "\ufeff": "",
        "\t": " ",
    }
)

Shingles = npt.NDArray[np.uint64]


@dataclasses.dataclass(frozen=True, slots=True)
class Book:
    author: str
    title: str
    file: str
    text: str
    shingles: Shingles  # sorted, each once


def cleaned(raw: str) -> str:
    """A paragraph of prose is one line; verse keeps its lines."""
    text = unicodedata.normalize("NFC", raw.replace("\r\n", "\n").replace("\r", "\n")).translate(_PLAIN)
    text = _NOTES.sub("", text)
    paragraphs = (_paragraph(lines) for lines in re.split(r"\n[ ]*\n+", text))
    joined = "\n\n".join(paragraph for paragraph in paragraphs if paragraph)
    joined = re.sub(r" ?-{2,} ?", "—", joined.replace("_", ""))
    unwanted = {c for c in set(joined) - {"\n"} if unicodedata.category(c) in ("Cc", "Cf", "Co", "Cn")}
    return joined.translate(dict.fromkeys(map(ord, unwanted)))


def _paragraph(lines: str) -> str:
    rows = [row for row in lines.split("\n") if row.strip(" *-=_~.")]
    is_prose = len(rows) > 1 and all(len(row) >= PROSE_LINE and not row.startswith("  ") for row in rows[1:-1])
    is_prose = is_prose and len(rows[0].strip()) >= PROSE_LINE - 12 and not rows[-1].startswith("  ")
    stripped = [re.sub(" +", " ", row.strip()) for row in rows]
    return (" " if is_prose else "\n").join(stripped)


def shingles(text: str) -> Shingles:
    """Of the sampled runs of words; equal texts have equal ones in every process."""
    words = re.findall(r"[a-z]+", text.lower())
    codes = np.fromiter((zlib.crc32(word.encode()) for word in words), np.uint64, len(words))
    if len(codes) < SHINGLE_WORDS:
        return np.empty(0, np.uint64)
    runs = np.zeros(len(codes) - SHINGLE_WORDS + 1, np.uint64)
    for offset in range(SHINGLE_WORDS):
        runs = runs * np.uint64(0x9E3779B97F4A7C15) + codes[offset : offset + len(runs)]
    runs ^= runs >> np.uint64(29)
    return np.unique(runs[runs % np.uint64(SAMPLED_OF) == 0])


def _read(path: Path) -> Book:
    book = _read_listed(path)
    return dataclasses.replace(book, shingles=shingles(book.text))


def _read_listed(path: Path) -> Book:
    """A book that was chosen before: without shingles, which take most of the time."""
    raw = path.read_bytes()
    try:
        text = cleaned(raw.decode("utf-8"))
    except UnicodeDecodeError:
        text = cleaned(raw.decode("cp1252", "replace"))
    author, _, title = path.stem.partition("___")
    return Book(author, title.replace("_", ":"), path.name, text, np.empty(0, np.uint64))


def _of_split(job: tuple[Path, str]) -> list[Shingles]:
    return [shingles(document.text) for document in read_documents(*job)]  # type: ignore[arg-type]


def _surname(author: str) -> str:
    return author.split("(")[0].split()[-1].lower()


def _shared(book: Book, known: Shingles) -> float:
    return float(np.isin(book.shingles, known).mean()) if len(book.shingles) else 1.0


def chosen(books: Iterator[Book], held_out: Shingles, known: Shingles, surnames: set[str]) -> Iterator[Book]:
    """The books that may be trained on, in order."""
    of_author: Counter[str] = Counter()
    seen: set[int] = set(known.tolist())
    for book in books:
        if _surname(book.author) in surnames or book.author in LEFT_OUT or len(book.text) < FEWEST_CHARACTERS:
            continue
        if of_author[book.author] + len(book.text) > MOST_OF_AUTHOR or _shared(book, held_out) > MOST_HELD_OUT:
            continue
        runs = book.shingles.tolist()
        if sum(run in seen for run in runs) > MOST_SHARED * len(runs):
            continue
        of_author[book.author] += len(book.text)
        seen.update(runs)
        yield book


def write(books: Iterator[Book], out: Path) -> None:
    """Shards of JSON lines, and the list of what is in them."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / "more_books.tsv").open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, delimiter="\t", lineterminator="\n")
        rows.writerow(("author", "title", "words", "bytes", "file"))
        lines: list[bytes] = []
        shard = 0
        for book in books:
            record = {"id": book.file.removesuffix(".txt"), "title": book.title, "author": book.author}
            lines.append((json.dumps({**record, "text": book.text}, ensure_ascii=False) + "\n").encode())
            rows.writerow((book.author, book.title, len(book.text.split()), len(book.text.encode()), book.file))
            if sum(map(len, lines)) > SHARD_BYTES:
                _publish(lines, out, shard)
                lines, shard = [], shard + 1
        if lines:
            _publish(lines, out, shard)


def _publish(lines: list[bytes], out: Path, shard: int) -> None:
    packed = zstandard.ZstdCompressor(level=10, threads=-1).compress(b"".join(lines))
    (out / f"more-train-{shard:02}.jsonl.zst").write_bytes(packed)
    print(f"shard {shard}: {len(lines)} books, {sum(map(len, lines)):,} bytes, {len(packed):,} packed", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", type=Path, metavar="LIST.tsv")
    options = parser.parse_args()
    if options.only is not None:
        with options.only.open(encoding="utf-8", newline="") as listed:
            files = [options.texts / row["file"] for row in csv.DictReader(listed, delimiter="\t")]
        with Pool() as pool:
            write(pool.imap(_read_listed, files, 4), options.out)
        return
    files = sorted(options.texts.glob("*___*.txt"), key=lambda path: zlib.crc32(path.name.encode()))
    held_out_authors = {
        _surname(document.author)
        for split in ("val", "test")
        for document in read_documents(options.corpus, split)  # type: ignore[arg-type]
    }
    with Pool() as pool:
        train, val, test = pool.map(_of_split, [(options.corpus, split) for split in ("train", "val", "test")], 1)
        held_out = np.unique(np.concatenate(val + test))
        books = chosen(pool.imap(_read, files, 4), held_out, np.unique(np.concatenate(train)), held_out_authors)
        write(books, options.out)


if __name__ == "__main__":
    main()
