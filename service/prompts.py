"""Text and token ids -> the ids a request starts with, within the server's limits."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Sequence

from nsm_core.errors import InvalidRequest
from nsm_core.tokenizer import Tokenizer
from service.backends.base import InferenceBackend

INLINE_CHARS = 4096  # longer texts are encoded on a thread: the event loop serves every stream


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The ids that one choice reads. `num_start`: number of leading ids that are not part of the client's prompt."""

    ids: tuple[int, ...]
    num_start: int = 0


class PromptEncoder:
    """Encodes prompts; every refusal names the field, the limit and the given value."""

    def __init__(self, backend: InferenceBackend, *, max_tokens: int) -> None:
        self._backend = backend
        self._max_tokens = max_tokens

    @property
    def tokenizer(self) -> Tokenizer:
        return self._backend.tokenizer

    async def fresh(self, text: str, *, param: str = "prompt") -> Prompt:
        """A text that begins a sequence: the end-of-text id stands in front as start of text."""
        ids = (self.tokenizer.end_of_text_id, *await self.encode(text, param=param))
        self._check_length(len(ids), param)
        return Prompt(ids=ids, num_start=1)

    async def read(self, prompt: str | Sequence[int], *, param: str = "prompt") -> Prompt:
        """A text or token ids as a prompt of its own."""
        if isinstance(prompt, str):
            return await self.fresh(prompt, param=param)
        return self.verbatim(prompt, param=param)

    def verbatim(self, ids: Sequence[int], *, param: str = "prompt") -> Prompt:
        """Ids, at least one, are taken as they are."""
        self.check_ids(ids, param=param)
        return Prompt(ids=tuple(ids))

    async def encode(self, text: str, *, param: str) -> list[int]:
        """Ids of a text, without a start token; at most `max_tokens` of them."""
        self.check_size(text, param=param)
        if len(text) <= INLINE_CHARS:
            ids = self.tokenizer.encode(text)
        else:
            ids = (await asyncio.to_thread(self.tokenizer.encode_batch, [text]))[0]
        self._check_length(len(ids), param)
        return ids

    def check_size(self, given: str | Sequence[int], *, param: str) -> None:
        """Refuses at once, before other work on it, what is too long in every case. Raises InvalidRequest."""
        if isinstance(given, str):
            self._check_bytes(given, param)
        else:
            self._check_length(len(given), param)

    def check_ids(self, ids: Sequence[int], *, param: str) -> None:
        """Raises InvalidRequest for too many ids, or one outside the vocabulary."""
        self._check_length(len(ids), param)
        vocab_size = self.tokenizer.vocab_size
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            wrong = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
            raise InvalidRequest(f"{param} must hold token ids in [0, {vocab_size - 1}], got {wrong}", param=param)

    @functools.cached_property
    def _max_token_bytes(self) -> int:
        return max(len(self.tokenizer.token_bytes(token_id)) for token_id in range(self.tokenizer.vocab_size))

    def _check_bytes(self, text: str, param: str) -> None:
        """Refuses texts that are too long in every case, before encoding them."""
        num_tokens = -(-len(text.encode("utf-8", "surrogatepass")) // self._max_token_bytes)
        if num_tokens > self._max_tokens:
            raise InvalidRequest(_too_long(param, self._max_tokens, f"at least {num_tokens}"), param=param)

    def _check_length(self, num_tokens: int, param: str) -> None:
        if num_tokens > self._max_tokens:
            raise InvalidRequest(_too_long(param, self._max_tokens, str(num_tokens)), param=param)


def _too_long(param: str, limit: int, given: str) -> str:
    return f"{param} must have at most {limit} tokens, got {given}"
