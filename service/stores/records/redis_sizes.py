"""The bytes of a tenant's documents in Redis, for quotas. In a cluster they live on another server than the documents.

A document is the truth, its entry here is written after it: exact when nothing was interrupted. Each look at the sum
checks some entries, chosen by chance, and drops those whose document expired or was deleted.
"""

from __future__ import annotations

import logging

from nsm_core.errors import NsmError
from service.stores.redis.client import RedisClient
from service.stores.redis.keys import Keyspace
from service.stores.redis.scripts import load_script

logger = logging.getLogger("nsm.store")

NUM_CHECKED = 16  # entries at each look
PUT = load_script("size_put", package="service.stores.records")
FORGET = load_script("size_forget", package="service.stores.records")


class DocumentSizes:
    """Entries by the document's key, under the tenant's own hash tag."""

    def __init__(self, client: RedisClient, keys: Keyspace) -> None:
        self._client = client
        self._keys = keys

    async def put(self, tenant: str, key: str, *, version: int, num_bytes: int) -> None:
        """After the document was written. It is safe by now: a failure here goes to the log alone."""
        try:
            await self._client.script(PUT, self._keys.documents(tenant), key, version, num_bytes)
        except NsmError as error:
            logger.warning("a tenant's usage is behind until the document's next change: %s", error)

    async def forget(self, tenant: str, key: str) -> None:
        """After the document was deleted. On failure a later look at the sum does it."""
        try:
            await self._forget(tenant, key.encode())
        except NsmError as error:
            logger.warning("a deleted document counts until a look at the usage finds it: %s", error)

    async def total(self, tenant: str) -> int:
        entries, total = self._keys.documents(tenant)
        found = await self._client.command("HRANDFIELD", entries, NUM_CHECKED, "WITHVALUES")
        checks = [("EXISTS", key) for key, _ in found]
        are_there = await self._client.call(lambda attempt: attempt.together(*checks)) if checks else []
        for (key, entry), is_there in zip(found, are_there, strict=True):
            if not is_there:
                await self._forget(tenant, key, entry)
        return int(await self._client.command("GET", total) or 0)

    async def _forget(self, tenant: str, key: bytes, entry: bytes = b"") -> None:
        """`entry`: only if it is still this one."""
        await self._client.script(FORGET, self._keys.documents(tenant), key, entry)
