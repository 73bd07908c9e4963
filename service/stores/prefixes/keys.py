"""Names for the beginnings of a prompt: one pass over its ids, however many beginnings are asked for."""

from __future__ import annotations

import array
import sys
from collections.abc import Iterable, Sequence

from nsm_core.hashing import new_identity
from nsm_core.model_info import ModelInfo
from service.stores.prefixes.base import PrefixKey

# Shorter beginnings are neither kept nor looked up: reading them again costs about as much as fetching a state.
MIN_TOKENS = 64
DIGEST_CHARS = 32  # 128 bits
ID_BYTES = 4


def encode_ids(ids: Sequence[int]) -> bytes:
    """4 bytes each, little endian."""
    words = array.array("I", ids)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


class PromptDigests:
    """The beginnings of one prompt of at least MIN_TOKENS ids, as one tenant's on one model in one numerics class.

    Equal prompts of two tenants have nothing in common here: no key of one can be met, or guessed, with the other's.
    """

    def __init__(self, *, tenant: str, model: ModelInfo, ids: Sequence[int]) -> None:
        self.raw = encode_ids(ids)
        self.num_ids = len(ids)
        self._seed = new_identity(tenant, model.fingerprint, model.numerics)
        self.family = self.at((MIN_TOKENS,))[MIN_TOKENS]

    def at(self, positions: Iterable[int]) -> dict[int, str]:
        """The digest of the first `position` ids for each position, which is at most the number of ids."""
        running, start, digests = self._seed.copy(), 0, {}
        for position in sorted(set(positions)):
            running.update(self.raw[ID_BYTES * start : ID_BYTES * position])
            start = position
            digests[position] = running.hexdigest()[:DIGEST_CHARS]
        return digests

    def key(self, position: int) -> PrefixKey:
        return PrefixKey(family=self.family, position=position, digest=self.at((position,))[position])

    def longest(self, keys: Iterable[PrefixKey], *, limit: int) -> PrefixKey | None:
        """The key of the longest of this prompt's beginnings with at most `limit` ids; None when none is there."""
        fitting = [key for key in keys if key.family == self.family and key.position <= limit]
        digests = self.at(key.position for key in fitting)
        matching = [key for key in fitting if digests[key.position] == key.digest]
        return max(matching, key=lambda key: key.position, default=None)
