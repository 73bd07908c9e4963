"""Text to token ids and back: every byte string round-trips, no text is ever a special token."""

from __future__ import annotations

import abc
import codecs
import functools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from nsm_core.chat_template import ChatTemplate
from nsm_core.config import TOKENIZER_FILE as TOKENIZER_FILE
from nsm_core.errors import CheckpointError, InvalidRequest
from nsm_core.hashing import identity

END_OF_TEXT = "<|endoftext|>"
DESCRIPTION_FILE = "tokenizer_config.json"

_ESCAPED_BYTE = re.compile("([\udc80-\udcff])")  # what the surrogateescape handler makes of a bad byte
# A tokenizer that normalises, strips, adds a space or reads special tokens in text does not give this back
_PROBE = f"a  B\r\n\té e\u0301 ﬁ {END_OF_TEXT} "


def describe(template: ChatTemplate, tokenizer: Tokenizer) -> dict[str, Any]:
    """What a `tokenizer_config.json` says of these tokenizers, for programs that load them with `transformers`."""
    return {
        "tokenizer_class": tokenizer.transformers_class,
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,  # text that looks like a special token is text
        "chat_template": template.jinja,
    }


def _byte_alphabet() -> dict[str, int]:
    """The byte-level BPE alphabet: printable bytes stand for themselves, the others for code points from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    alphabet.update({chr(256 + offset): byte for offset, byte in enumerate(others)})
    return alphabet


def _all_token_bytes(inner: tokenizers.Tokenizer) -> Iterator[bytes]:
    alphabet = _byte_alphabet()
    for token_id in range(inner.get_vocab_size()):
        token = inner.id_to_token(token_id)
        if token is None or token == END_OF_TEXT:
            yield b""
        elif set(token) <= alphabet.keys():
            yield bytes(alphabet[char] for char in token)
        else:
            raise CheckpointError(f"the tokenizer is not byte-level: token {token_id} is {token!r}")


def _require_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"text holds an unpaired surrogate at character {error.start}") from error


class Tokenizer(abc.ABC):
    """Text and bytes to ids and back: every byte has a token. Immutable and safe to share between threads.

    `end_of_text_id`: starts and ends a text; no text is ever read as this token. `fingerprint`: its identity.
    """

    file_name: ClassVar[str]
    transformers_class: ClassVar[str]  # what `transformers`, or code beside a model, calls it

    def __init__(self, *, token_bytes: Sequence[bytes], end_of_text_id: int, fingerprint: str) -> None:
        """`token_bytes`: what each id stands for; empty for special tokens. Raises CheckpointError."""
        self.end_of_text_id = end_of_text_id
        self.vocab_size = len(token_bytes)
        self.fingerprint = fingerprint
        self._token_bytes = tuple(token_bytes)
        self._ids_with = functools.lru_cache(maxsize=64)(self._find_ids_with)
        self._byte_ids = {raw[0]: token_id for token_id, raw in enumerate(self._token_bytes) if len(raw) == 1}
        if len(self._byte_ids) != 256:
            raise CheckpointError(
                f"the tokenizer must have a token for each of 256 bytes, it has {len(self._byte_ids)}"
            )

    @abc.abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Like `encode` for many texts."""

    @abc.abstractmethod
    def encode_bytes(self, raw: bytes) -> list[int]:
        """Ids of any byte string; those of valid UTF-8 equal the text's."""

    @abc.abstractmethod
    def to_json(self) -> str:
        """The whole tokenizer on one line; `tokenizer_from_json` reads it."""

    @abc.abstractmethod
    def save(self, path: Path) -> None:
        """Writes a file that is called `file_name` beside a model; `load_tokenizer` reads it."""

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without a start token. Raises InvalidRequest for invalid Unicode (unpaired surrogates)."""
        return self.encode_batch([text])[0]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for; empty for special tokens. Raises InvalidRequest for an unknown id."""
        if not 0 <= token_id < self.vocab_size:
            raise InvalidRequest(f"a token id must be in [0, {self.vocab_size - 1}], got {token_id}")
        return self._token_bytes[token_id]

    @functools.cached_property
    def ascii_texts(self) -> Mapping[int, str]:
        """The texts of tokens that are ASCII, by id: nearly all."""
        return {token_id: raw.decode("ascii") for token_id, raw in enumerate(self._token_bytes) if raw.isascii()}

    def ids_with(self, some: frozenset[int]) -> frozenset[int]:
        """Ids of the tokens that have one of these bytes. The same value for the same bytes, as long as few others are
        asked for: hundreds of requests then look into one set.
        """
        return self._ids_with(some)

    def _find_ids_with(self, some: frozenset[int]) -> frozenset[int]:
        return frozenset(token_id for token_id, raw in enumerate(self._token_bytes) if not some.isdisjoint(raw))

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The exact bytes of `ids`. Raises InvalidRequest for an unknown id."""
        return b"".join(map(self.token_bytes, ids))

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; bytes that are not valid UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")


class BpeTokenizer(Tokenizer):
    """A byte-level BPE over the `tokenizers` library."""

    file_name = TOKENIZER_FILE
    transformers_class = "PreTrainedTokenizerFast"

    def __init__(self, inner: tokenizers.Tokenizer, *, vocab_size: int = 0) -> None:
        """`vocab_size`: of the model, if it is larger; ids without a token stand for no bytes."""
        # Text that looks like a special token is text: only code may place one.
        inner.encode_special_tokens = True
        self._inner = inner
        end_id = inner.token_to_id(END_OF_TEXT)
        if end_id is None:
            raise CheckpointError(f"the tokenizer has no {END_OF_TEXT} token")
        token_bytes = list(_all_token_bytes(inner))
        super().__init__(
            token_bytes=token_bytes + [b""] * (vocab_size - len(token_bytes)),
            end_of_text_id=end_id,
            fingerprint=identity(inner.to_str().encode()),
        )
        if self.decode(self.encode(_PROBE)) != _PROBE:
            raise CheckpointError("the tokenizer does not give every text back as it was")

    @classmethod
    def load(cls, path: Path, *, vocab_size: int = 0) -> BpeTokenizer:
        """Reads `tokenizer.json` (or the one in a directory); raises CheckpointError."""
        file = path / TOKENIZER_FILE if path.is_dir() else path
        try:
            return cls(tokenizers.Tokenizer.from_file(str(file)), vocab_size=vocab_size)
        except CheckpointError:
            raise
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"cannot read tokenizer {file}: {error}") from error

    @classmethod
    def from_json(cls, text: str, *, vocab_size: int = 0) -> BpeTokenizer:
        """The inverse of `to_json`; raises CheckpointError."""
        try:
            return cls(tokenizers.Tokenizer.from_str(text), vocab_size=vocab_size)
        except CheckpointError:
            raise
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"cannot read a tokenizer: {error}") from error

    @classmethod
    def train(cls, texts: Iterable[str], *, vocab_size: int) -> BpeTokenizer:
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
        path.write_text(self.to_json() + "\n", "utf-8")

    def to_json(self) -> str:
        """What a `tokenizer.json` holds, on one line."""
        return str(self._inner.to_str(pretty=False))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Like `encode` for many texts, in parallel."""
        for text in texts:
            _require_unicode(text)
        # The fast form leaves out offsets and token strings: half the time and a fifth of the memory
        return [item.ids for item in self._inner.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_bytes(self, raw: bytes) -> list[int]:
        """Ids of any byte string: valid UTF-8 runs as text, every other byte as its own token."""
        return list(self._encode_runs(raw.decode("utf-8", "surrogateescape")))

    def _encode_runs(self, escaped: str) -> Iterator[int]:
        for run in _ESCAPED_BYTE.split(escaped):
            if _ESCAPED_BYTE.fullmatch(run):
                yield self._byte_ids[ord(run) - 0xDC00]
            elif run:
                yield from self.encode(run)


def encode_on_one_thread() -> None:
    """For servers, which encode one text at a time: beside it the library's threads, one for each core, only spin."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class IncrementalDecoder:
    """Turns tokens into text one by one; the pieces joined equal `Tokenizer.decode` of all of them."""

    __slots__ = ("_has_part", "_texts", "_tokenizer", "_utf8")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts = tokenizer.ascii_texts
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._has_part = False  # bytes of an unfinished character wait

    def feed(self, token_id: int) -> str:
        """Text that became complete with this token; an unfinished character waits for its other bytes."""
        text = None if self._has_part else self._texts.get(token_id)
        return self.feed_bytes(self._tokenizer.token_bytes(token_id)) if text is None else text

    def feed_bytes(self, raw: bytes) -> str:
        """Like `feed`, for a part of a token or several."""
        if raw.isascii() and not self._has_part:  # nearly always, and several times as fast
            return raw.decode("ascii")
        text = self._utf8.decode(raw)
        self._has_part = bool(self._utf8.getstate()[0])
        return text

    def flush(self) -> str:
        """Text of an unfinished character at the end (U+FFFD); the decoder starts afresh."""
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        self._has_part = False
        return text
