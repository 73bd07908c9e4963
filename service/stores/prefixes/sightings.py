"""Which beginnings of prompts this process has seen: where two prompts part, a state is worth storing."""

from __future__ import annotations

from collections import OrderedDict

from service.stores.prefixes.keys import MIN_TOKENS, PromptDigests

MAX_PER_TENANT = 32_768  # two million tokens of prompts, about 5 MB


class PrefixSightings:
    """The second prompt with a common beginning finds it: a system prompt, few-shot examples.

    Beginnings are multiples of MIN_TOKENS long. Each tenant has its own, so no tenant's prompts affect another's.
    """

    def __init__(self, *, max_per_tenant: int = MAX_PER_TENANT) -> None:
        self._max_per_tenant = max_per_tenant
        self._tenants: dict[str, OrderedDict[str, None]] = {}

    def record(self, tenant: str, digests: PromptDigests) -> int:
        """Record the prompt. Returns the length of its longest beginning recorded before, in tokens; 0 for none.

        The last id does not count: at least one token must be left to read.
        """
        beginnings = digests.at(range(MIN_TOKENS, digests.num_ids, MIN_TOKENS))
        seen = self._tenants.setdefault(tenant, OrderedDict())
        longest = 0
        for position, digest in beginnings.items():
            if digest in seen:
                longest = position
                seen.move_to_end(digest)
            else:
                seen[digest] = None
        while len(seen) > self._max_per_tenant:
            seen.popitem(last=False)
        return longest
