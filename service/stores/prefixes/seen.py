"""Which beginnings of prompts this process has met: where two prompts part, a state is worth keeping."""

from __future__ import annotations

from collections import OrderedDict

from service.stores.prefixes.keys import MIN_TOKENS, PromptDigests

MAX_PLACES = 32_768  # of a tenant: two million tokens of prompts, about 5 MB


class SeenPrefixes:
    """A system prompt or few-shot examples that many prompts begin with are found by the second of them.

    Places are multiples of MIN_TOKENS. Each tenant has its own, so no tenant's prompts change what another's do.
    """

    def __init__(self, *, max_places: int = MAX_PLACES) -> None:
        self._max_places = max_places
        self._tenants: dict[str, OrderedDict[str, None]] = {}

    def meet(self, tenant: str, digests: PromptDigests) -> int:
        """Remembers the prompt. The length of its longest beginning that was met before; 0 when none was.

        The last id does not count: something must be left to read.
        """
        places = digests.at(range(MIN_TOKENS, digests.num_ids, MIN_TOKENS))
        seen = self._tenants.setdefault(tenant, OrderedDict())
        longest = 0
        for position, digest in places.items():
            if digest in seen:
                longest = position
                seen.move_to_end(digest)
            else:
                seen[digest] = None
        while len(seen) > self._max_places:
            seen.popitem(last=False)
        return longest
