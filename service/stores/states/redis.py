"""Named states in Redis, under the session store's prefix, through its connections.

All of a tenant's share one hash tag: fields and sizes in one hash, the next version of each name in another, and each
state's bytes under a key of their own, which no script reads.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from nsm_core.errors import SnapshotCorrupt, StoreUnavailable, VersionConflict
from service.stores.redis.client import Attempt
from service.stores.redis.keys import STATE_HEADS, StateKeys
from service.stores.redis.scripts import load_script
from service.stores.sessions.redis import RedisSessionStore
from service.stores.states.base import (
    PUBLISHED,
    NamedState,
    NewState,
    StoredState,
    name_is_published,
    new_of,
    published_last,
)
from service.stores.states.fields import decode_fields, encode_fields

STAGED_S = 600  # for bytes whose state was not added: its process has ended
ADD = load_script("add", package="service.stores.states")
RESTORE = load_script("restore", package="service.stores.states")
IS_THERE = -1  # of that script: the version was there before
DELETE = load_script("delete", package="service.stores.states")


class RedisStateStore:
    """The shared StateStore."""

    def __init__(self, sessions: RedisSessionStore, *, clock: Callable[[], float] = time.time) -> None:
        self._sessions = sessions
        self._client = sessions.client
        self._keys = sessions.keys
        self._clock = clock

    async def add(self, *, tenant: str, name: str, state: NewState) -> NamedState:
        if await self._is_own(tenant, name):
            return await self._add(tenant, name, state)
        await self._require_unpublished(name)
        added = await self._add(tenant, name, state)
        try:  # a tenant's names and the published ones may live on two servers: no script reads both
            await self._require_unpublished(name)  # whatever else was added meanwhile: it may be deleted again too
        except VersionConflict:
            await self.delete(tenant=tenant, name=name, version=added.version)
            raise
        return added

    async def _is_own(self, tenant: str, name: str) -> bool:
        return tenant == PUBLISHED or any(state.name == name for state in await self.list(tenant=tenant))

    async def _require_unpublished(self, name: str) -> None:
        """Raises VersionConflict."""
        if await self.get(tenant=PUBLISHED, name=name) is not None:
            raise name_is_published(name)

    async def _add(self, tenant: str, name: str, state: NewState) -> NamedState:
        nonce = secrets.token_hex(12)
        keys, fields = await self._stage(tenant, state, nonce), encode_fields(state, created_at=self._clock())
        version = await self._client.script(ADD, keys, name, nonce, fields)
        return decode_fields(tenant, name, _number_given(version), fields)

    async def _stage(self, tenant: str, state: NewState, nonce: str) -> tuple[str, ...]:
        """Puts the bytes where a script makes them a state; returns the script's keys."""
        keys = self._keys.states(tenant)
        staged, text = keys.file(nonce), "" if state.text is None else "t" + state.text
        put = ("HSET", staged, "file", state.file, "text", text, "tenant", tenant)
        await self._client.call(lambda attempt: attempt.together(put, ("EXPIRE", staged, STAGED_S)))
        return (*keys.index, staged)

    async def restore(self, stored: StoredState, *, newest: int) -> bool:
        head = stored.head
        if await self.get(tenant=head.tenant, name=head.name, version=head.version) is not None:
            return False
        is_own = await self._is_own(head.tenant, head.name)
        if not is_own:
            await self._require_unpublished(head.name)
        is_new = await self._restore(stored, newest)
        if is_new and not is_own:
            try:  # as in `add`
                await self._require_unpublished(head.name)
            except VersionConflict:
                await self.delete(tenant=head.tenant, name=head.name, version=head.version)
                raise
        return is_new

    async def _restore(self, stored: StoredState, newest: int) -> bool:
        head, state, nonce = stored.head, new_of(stored), secrets.token_hex(12)
        keys, fields = await self._stage(head.tenant, state, nonce), encode_fields(state, created_at=head.created_at)
        number = max(newest, head.version)
        answer = await self._client.script(RESTORE, keys, head.name, nonce, fields, str(head.version), str(number))
        return answer != IS_THERE and _number_given(answer) == head.version

    async def newest_version(self, *, tenant: str, name: str) -> int:
        given = _number(await self._client.command("HGET", self._keys.states(tenant).newest, name))
        return max([given or 0, *(state.version for state in await self.list(tenant=tenant) if state.name == name)])

    async def list_tenants(self) -> tuple[str, ...]:
        """Raises SnapshotCorrupt for states whose tenant nothing tells."""

        async def names(attempt: Attempt) -> set[bytes]:
            return {key async for key in attempt.scan(self._keys.any_state_heads)}

        found = await self._client.call(names)
        known = {
            self._keys.states(one).heads.encode(): one for one in (PUBLISHED, *await self._sessions.list_tenants())
        }
        return published_last([known.get(key) or await self._tenant_of(key.decode()) for key in found])

    async def _tenant_of(self, heads: str) -> str:
        """Keys have a hash of the tenant; its name is beside the bytes of states."""
        for entry in (await self._client.command("HGETALL", heads)).values():
            file = StateKeys(heads.removesuffix(f":{STATE_HEADS}")).file(_parts(entry)[0])
            tenant = await self._client.command("HGET", file, "tenant")
            if tenant is not None and self._keys.states(tenant.decode()).heads == heads:
                return str(tenant.decode())
        raise SnapshotCorrupt(
            f"the named states under {heads} do not name their tenant: an older build stored them, and the tenant has "
            "no session; make a session or a state for this tenant, or name the tenant"
        )

    async def get(self, *, tenant: str, name: str, version: int | None = None) -> NamedState | None:
        keys, newest = self._keys.states(tenant), version
        if version is None:
            newest = _number(await self._client.command("HGET", keys.newest, name))
        if newest is not None:
            wanted, later = (f"{name}@{number}" for number in (newest, newest + 1))
            entry, later_entry = await self._client.command("HMGET", keys.heads, wanted, later)
            if version is not None or (entry is not None and later_entry is None):
                return None if entry is None else _head_of(tenant, wanted, entry)
        # The newest was deleted, or the table of newest versions is damaged: all are looked at
        return next((state for state in await self.list(tenant=tenant) if state.name == name), None)

    async def load(self, *, tenant: str, name: str, version: int) -> StoredState | None:
        keys = self._keys.states(tenant)
        entry = await self._client.command("HGET", keys.heads, f"{name}@{version}")
        if entry is None:
            return None
        nonce, fields = _parts(entry)

        async def work(attempt: Attempt) -> list[bytes | None]:
            found: list[bytes | None] = await attempt.command("HMGET", keys.file(nonce), "file", "text")
            return found

        file, text = await self._client.call(work)
        if file is None or text is None:
            raise SnapshotCorrupt(f"the bytes of state {name}@{version} are missing")
        head = decode_fields(tenant, name, version, fields)
        return StoredState(head=head, file=file, text=text[1:].decode() if text else None)

    async def list(self, *, tenant: str) -> tuple[NamedState, ...]:
        entries = await self._client.command("HGETALL", self._keys.states(tenant).heads)
        found = [_head_of(tenant, key.decode(), entry) for key, entry in entries.items()]
        return tuple(sorted(found, key=lambda state: (state.name, -state.version)))

    async def delete(self, *, tenant: str, name: str, version: int | None = None) -> int:
        keys, num_deleted = self._keys.states(tenant), 0
        for key, entry in (await self._client.command("HGETALL", keys.heads)).items():
            head, (nonce, _) = _head_of(tenant, key.decode(), entry), _parts(entry)
            if head.name == name and version in (None, head.version):
                await self._client.script(DELETE, (*keys.index, keys.file(nonce)), head.reference, nonce)
                num_deleted += 1
        return num_deleted

    async def usage(self, *, tenant: str) -> int:
        return sum(state.num_bytes for state in await self.list(tenant=tenant))


def _head_of(tenant: str, key: str, entry: bytes) -> NamedState:
    name, _, version = key.rpartition("@")
    return decode_fields(tenant, name, int(version), _parts(entry)[1])


def _number_given(answer: object) -> int:
    """By a script that makes staged bytes a state. Raises StoreUnavailable."""
    if not isinstance(answer, int) or answer < 1:
        raise StoreUnavailable("the session store took too long to add a state")
    return answer


def _number(raw: bytes | None) -> int | None:
    return int(raw) if raw is not None and raw.isdigit() else None


def _parts(entry: bytes) -> tuple[str, bytes]:
    """The nonce that names the bytes, and the fields."""
    nonce, _, fields = entry.partition(b" ")
    return nonce.decode(), fields
