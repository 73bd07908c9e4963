"""RWKV's World vocabulary: at each byte of a text the longest token that fits.

The vocabulary is a text file, one token a line: its id, the token as a Python literal, its length in bytes.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from nsm_core.errors import CheckpointError, InvalidRequest, reason_of
from nsm_core.hashing import identity
from nsm_core.tokenizer import Tokenizer

VOCABULARY_FILE = "rwkv_vocab_v20230424.txt"
VOCABULARY_PACKAGES = ("pyrwkv_tokenizer", "rwkv")  # each carries the vocabulary under this name
KIND = "rwkv-world"  # in `to_json`
MAX_VOCABULARY_BYTES = 32 << 20  # of a file; the one that all models share has 1.2 MB
MAX_TOKENS = 1 << 20
MAX_TOKEN_BYTES = 4096
_HEAD = 4  # bytes that the lengths of longer tokens are filed under

# No \\N (a table of names that a vocabulary has no need of) and no escape that Python would warn of
_BODY = r"(?:[^\\]|\\[\\'\"abfnrtvxuU])*"
_LINE = re.compile(rf"(\d{{1,7}}) (b?(?:'{_BODY}'|\"{_BODY}\")) (\d{{1,4}})")


class WorldTokenizer(Tokenizer):
    """Greedy longest match on bytes. Id 0 ends a text; ids without a token stand for no bytes."""

    file_name = VOCABULARY_FILE
    transformers_class = "RwkvTokenizer"

    def __init__(self, tokens: Mapping[int, bytes], *, vocab_size: int = 0) -> None:
        """`tokens`: bytes by id, from 1 on. `vocab_size`: of the model, if it is larger. Raises CheckpointError."""
        if not tokens or min(tokens) < 1 or max(max(tokens) + 1, vocab_size) > MAX_TOKENS:
            raise CheckpointError(f"a World vocabulary has ids from 1 to {MAX_TOKENS - 1}")
        size = max(max(tokens) + 1, vocab_size)
        token_bytes = tuple(tokens.get(token_id, b"") for token_id in range(size))
        self._ids = {raw: token_id for token_id, raw in tokens.items()}
        if b"" in self._ids or len(self._ids) != len(tokens):
            raise CheckpointError("a World vocabulary has no empty token and no token twice")
        self._longer = _lengths_by_head(self._ids)
        fingerprint = identity(json.dumps([KIND, [raw.decode("latin-1") for raw in token_bytes]]).encode())
        super().__init__(token_bytes=token_bytes, end_of_text_id=0, fingerprint=fingerprint)

    @classmethod
    def read(cls, path: Path, *, vocab_size: int = 0) -> WorldTokenizer:
        """Reads a vocabulary file. Raises CheckpointError that names file and line."""
        try:
            if path.stat().st_size > MAX_VOCABULARY_BYTES:
                raise CheckpointError(f"{path} is larger than {MAX_VOCABULARY_BYTES >> 20} MiB: no vocabulary")
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"cannot read vocabulary {path}: {reason_of(error)}") from error
        try:
            return cls(_parse_lines(text.split("\n")), vocab_size=vocab_size)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error

    @classmethod
    def from_json(cls, text: str) -> WorldTokenizer:
        """The inverse of `to_json`. Raises CheckpointError."""
        try:
            fields = json.loads(text)
            tokens = [token.encode("latin-1") for token in fields["tokens"]]
            is_known = fields["kind"] == KIND
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"cannot read a World tokenizer: {error}") from error
        if not is_known:
            raise CheckpointError("this is no World tokenizer")
        return cls({token_id: raw for token_id, raw in enumerate(tokens) if raw}, vocab_size=len(tokens))

    def to_json(self) -> str:
        """Kind and tokens by id, each byte as the character of its number."""
        return json.dumps({"kind": KIND, "tokens": [raw.decode("latin-1") for raw in self._token_bytes]})

    def save(self, path: Path) -> None:
        """Writes a vocabulary file, as other programs read it."""
        lines = (f"{token_id} {_literal(raw)} {len(raw)}\n" for token_id, raw in enumerate(self._token_bytes) if raw)
        path.write_text("".join(lines), "utf-8")

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Like `encode` for many texts."""
        return [self.encode_bytes(_utf8(text)) for text in texts]

    def encode_bytes(self, raw: bytes) -> list[int]:
        """Ids of any byte string; those of valid UTF-8 equal the text's."""
        ids: list[int] = []
        at, end, token_ids, longer = 0, len(raw), self._ids, self._longer
        while at < end:
            # A slice at the end of the text is shorter: its match is the longest all the same
            for length in (*longer.get(raw[at : at + _HEAD], ()), 4, 3, 2, 1):
                token_id = token_ids.get(raw[at : at + length])
                if token_id is not None:
                    ids.append(token_id)
                    at += length
                    break
        return ids


def find_vocabulary(directory: Path) -> Path:
    """The vocabulary file beside a model, or of an installed package. Raises CheckpointError that says what to do."""
    beside = sorted(path for path in directory.glob("rwkv_vocab_v*.txt") if path.is_file())
    if beside:
        return beside[-1]
    for package in VOCABULARY_PACKAGES:
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            if (file := Path(folder) / VOCABULARY_FILE).is_file():
                return file
    raise CheckpointError(
        f"no tokenizer for the model in {directory}: put {VOCABULARY_FILE} or tokenizer.json beside it, "
        "or `pip install pyrwkv-tokenizer`, which carries the vocabulary"
    )


def tokens_of_literals(literals: Iterable[bytes]) -> dict[int, bytes]:
    """Bytes by id of tokens that are written as in a Python literal without its quotes. Raises CheckpointError."""
    return {token_id: _unescape(literal) for token_id, literal in enumerate(literals)}


def _parse_lines(lines: Iterable[str]) -> dict[int, bytes]:
    tokens: dict[int, bytes] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        match = _LINE.fullmatch(line.rstrip("\r")) if len(line) <= 8 * MAX_TOKEN_BYTES else None
        raw = _literal_bytes(match[2]) if match is not None else None
        if match is None or raw is None or len(raw) != int(match[3]) or int(match[1]) in tokens:
            raise CheckpointError(f"line {number} is not `id literal length` of a World vocabulary, each id once")
        tokens[int(match[1])] = raw
    return tokens


def _literal_bytes(literal: str) -> bytes | None:
    """None for anything but a literal of text or bytes; only literals are ever evaluated."""
    plain = _PLAIN.fullmatch(literal)  # nearly all: the general way takes ten times as long
    if plain is not None:
        return plain[2].encode()
    try:
        value = ast.literal_eval(literal)
        return value.encode() if isinstance(value, str) else bytes(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


_PLAIN = re.compile(r"""(['"])([^'"\\]+)\1""")  # a text without quotes and escapes


def _literal(raw: bytes) -> str:
    try:
        return repr(raw.decode())
    except UnicodeDecodeError:
        return repr(raw)


_ESCAPE = re.compile(rb"\\(x[0-9a-fA-F]{2}|.)", re.DOTALL)
_CONTROLS = {b"t": b"\t", b"n": b"\n", b"r": b"\r"}


def _unescape(literal: bytes) -> bytes:
    def replace(match: re.Match[bytes]) -> bytes:
        code = match[1]
        return bytes.fromhex(code[1:].decode()) if len(code) == 3 else _CONTROLS.get(code, code)

    return _ESCAPE.sub(replace, literal)


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"text holds an unpaired surrogate at character {error.start}") from error


def _lengths_by_head(tokens: Iterable[bytes]) -> dict[bytes, tuple[int, ...]]:
    """For the first bytes of tokens: lengths above that which tokens have, longest first."""
    found: dict[bytes, set[int]] = {}
    for raw in tokens:
        if len(raw) > MAX_TOKEN_BYTES:
            raise CheckpointError(f"a token has more than {MAX_TOKEN_BYTES} bytes")
        if len(raw) > _HEAD:
            found.setdefault(raw[:_HEAD], set()).add(len(raw))
    return {head: tuple(sorted(lengths, reverse=True)) for head, lengths in found.items()}
