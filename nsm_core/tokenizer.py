"""Byte-level BPE over the `tokenizers` library: every byte string round-trips, no text is ever a special token."""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from nsm_core.errors import CheckpointError, InvalidRequest

END_OF_TEXT = "<|endoftext|>"
TOKENIZER_FILE = "tokenizer.json"


def _byte_alphabet() -> dict[str, int]:
    """The byte-level BPE alphabet: printable bytes stand for themselves, the others for code points from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    alphabet.update({chr(256 + offset): byte for offset, byte in enumerate(others)})
    return alphabet


class Tokenizer:
    """Text and bytes to ids and back. Immutable and safe to share between threads."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        # Text that looks like a special token is text: only code may place one.
        inner.encode_special_tokens = True
        self._inner = inner
        end_id = inner.token_to_id(END_OF_TEXT)
        if end_id is None:
            raise CheckpointError(f"the tokenizer has no {END_OF_TEXT} token")
        self.end_of_text_id: int = end_id
        self.vocab_size: int = inner.get_vocab_size()
        alphabet = _byte_alphabet()
        tokens = (inner.id_to_token(token_id) for token_id in range(self.vocab_size))
        self._token_bytes: tuple[bytes, ...] = tuple(
            b"" if token is None or token == END_OF_TEXT else bytes(alphabet[char] for char in token) for token in tokens
        )
        self._byte_ids = {raw[0]: token_id for token_id, raw in enumerate(self._token_bytes) if len(raw) == 1}
        self.fingerprint: str = hashlib.sha256(inner.to_str().encode()).hexdigest()

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Reads `tokenizer.json` (or the one in a directory); raises CheckpointError."""
        file = path / TOKENIZER_FILE if path.is_dir() else path
        try:
            return cls(tokenizers.Tokenizer.from_file(str(file)))
        except CheckpointError:
            raise
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"cannot read tokenizer {file}: {error}") from error

    @classmethod
    def train(cls, texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
        """Learns merges from `texts`; the vocabulary holds all 256 bytes and one special token (id 0)."""
        inner = tokenizers.Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        inner.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=sorted(_byte_alphabet()),
            show_progress=True,
        )
        inner.train_from_iterator(texts, trainer)
        return cls(inner)

    def save(self, path: Path) -> None:
        """Writes `tokenizer.json`."""
        path.write_text(self._inner.to_str(pretty=False) + "\n", "utf-8")

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without a start token. Raises InvalidRequest for text that is not valid Unicode (lone surrogates)."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"text holds an unpaired surrogate at character {error.start}") from error
        return list(self._inner.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Like `encode` for many texts, in parallel."""
        return [list(item.ids) for item in self._inner.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_bytes(self, raw: bytes) -> list[int]:
        """Ids of any byte string: valid UTF-8 runs as text, every other byte as its own token."""
        return list(self._encode_runs(raw.decode("utf-8", "surrogateescape")))

    def _encode_runs(self, escaped: str) -> Iterator[int]:
        start = 0
        for index, char in enumerate(escaped):
            if "\udc80" <= char <= "\udcff":
                yield from self.encode(escaped[start:index])
                yield self._byte_ids[ord(char) - 0xDC00]
                start = index + 1
        yield from self.encode(escaped[start:])

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for; empty for special tokens."""
        return self._token_bytes[token_id]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The exact bytes of `ids`."""
        return b"".join(self._token_bytes[token_id] for token_id in ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; bytes that are not valid UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")


class IncrementalDecoder:
    """Turns tokens into text one by one; the pieces joined equal `Tokenizer.decode` of all of them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        """Text that became complete with this token; an unfinished character waits for its other bytes."""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """Text of an unfinished character at the end (U+FFFD); the decoder starts afresh."""
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text
