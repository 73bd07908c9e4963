"""A server's named states: added, found, deleted, and ready to start from.

A name is the tenant's own, or else one that the operator has published. A state of another model or numerics class is
made again: from its log where the tokenizer is the same, else from its text. The result stays in this process's memory,
as do states in use: they never change.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping

from nsm_core.errors import Forbidden, InvalidRequest, SnapshotCorrupt, StateMismatch
from nsm_core.state.quantize import StateFormat
from service.backends.base import InferenceBackend
from service.named_states.making import Reader
from service.named_states.reference import Reference, parse_state, state_not_found
from service.named_states.signature import StateSeal
from service.named_states.start_state import StartState, renamed, snapshot_of
from service.named_states.tuned import tuned_for
from service.prompts import PromptEncoder
from service.stores.states.base import PUBLISHED, NamedState, NewState, StateStore, StoredState, name_is_published
from service.stores.states.fields import num_bytes_of
from service.telemetry.metrics.sessions import SessionMetrics
from service.tenants.tenants import Tenants
from service.transfer.import_session import rebuild, require_fit, require_tokenizer
from service.transfer.session_file import SessionFile, encode_file, read_file

MAX_CACHED_BYTES = 128 * 2**20


class StateLibrary:
    """Of one model. `seal`: of states that clients carry. `name_of`: the name of the model with a fingerprint, if this
    server serves it.
    """

    def __init__(
        self,
        backend: InferenceBackend,
        store: StateStore,
        tenants: Tenants,
        prompts: PromptEncoder,
        metrics: SessionMetrics,
        *,
        seal: StateSeal,
        state_format: StateFormat,
        name_of: Callable[[str], str | None] = lambda fingerprint: None,
    ) -> None:
        self._name_of = name_of
        self.seal = seal
        self.state_format = state_format
        self.backend, self.tenants, self.prompts = backend, tenants, prompts
        self._store = store
        self._metrics = metrics
        self._cached: OrderedDict[tuple[str, str, int, float], StartState] = OrderedDict()
        self._num_cached_bytes = 0
        self._loading: dict[tuple[str, str, int, float], asyncio.Lock] = {}

    def reader(self, deadline: float) -> Reader:
        """For ids that become a state before `deadline`, a `time.monotonic()` reading."""
        return Reader(
            backend=self.backend,
            request_id=f"state-{uuid.uuid4().hex}",
            deadline=deadline,
            state_format=self.state_format,
        )

    async def add(
        self,
        tenant: str,
        name: str,
        file: SessionFile,
        *,
        source: str,
        text: str | None = None,
        metadata: Mapping[str, str],
    ) -> NamedState:
        """The next version of `name`.

        Raises QuotaExceeded, VersionConflict for a published name, InvalidRequest for a file without a state.
        """
        state = await asyncio.to_thread(new_state, tenant, name, file, source=source, text=text, metadata=metadata)
        await self.tenants.check_stored_bytes(tenant, num_new_bytes=num_bytes_of(state))
        return await self._store.add(tenant=tenant, name=name, state=state)

    async def require_own_name(self, tenant: str, name: str) -> None:
        """Raises VersionConflict where the store would, before anything is read."""
        if tenant == PUBLISHED or await self._store.get(tenant=tenant, name=name) is not None:
            return
        if await self._store.get(tenant=PUBLISHED, name=name) is not None:
            raise name_is_published(name)

    async def read_file(self, raw: bytes) -> SessionFile:
        """An uploaded state or session of this model, checked. Raises InvalidRequest, StateMismatch."""
        file = await self.open_file(raw)
        await self.require_usable(file)
        return file

    async def open_file(self, raw: bytes) -> SessionFile:
        """An uploaded state or session, of any model. Raises InvalidRequest."""
        return await asyncio.to_thread(lambda: read_file(self.seal.open(raw), kind="state"))

    async def require_usable(self, file: SessionFile) -> None:
        """Raises InvalidRequest or StateMismatch for an uploaded file that the model could never start from."""
        if file.is_tuned:
            await asyncio.to_thread(tuned_for, file, self.backend)
        require_tokenizer(file, self.backend)  # without a text it could never be used here
        if snapshot_of(file).header.model_fingerprint == self.backend.model.fingerprint:
            await asyncio.to_thread(require_fit, snapshot_of(file), self.backend.model)

    async def list(self, tenant: str) -> tuple[NamedState, ...]:
        """The tenant's own states, then the published ones."""
        return (*await self._store.list(tenant=tenant), *await self._store.list(tenant=PUBLISHED))

    async def find(self, tenant: str, reference: Reference, *, param: str | None = "state") -> NamedState:
        """The tenant's own state; a published one only of a name of which the tenant has none. Raises NotFound."""
        name, version = reference.name, reference.version
        found = await self._store.get(tenant=tenant, name=name, version=version)
        if found is None and (version is None or await self._store.get(tenant=tenant, name=name) is None):
            found = await self._store.get(tenant=PUBLISHED, name=name, version=version)
        if found is None:
            raise state_not_found(reference, param=param)
        return found

    async def load(self, head: NamedState, *, param: str | None = "state") -> tuple[StoredState, SessionFile]:
        """A version as it is stored, and what is in it. Raises NotFound, SnapshotCorrupt."""
        stored = await self._store.load(tenant=head.tenant, name=head.name, version=head.version)
        if stored is None:
            raise state_not_found(Reference(head.name, head.version), param=param)
        try:
            return stored, await asyncio.to_thread(read_stored, stored)
        except SnapshotCorrupt:
            self._metrics.store_damaged("snapshot")
            raise

    async def delete(self, tenant: str, reference: Reference) -> int:
        """Of the tenant's own. Raises NotFound when there is none, Forbidden for a published one."""
        num = await self._store.delete(tenant=tenant, name=reference.name, version=reference.version)
        if not num:
            await self.find(tenant, reference)
            raise Forbidden(f"state {str(reference)!r} is published: only the operator can delete it")
        return num

    async def start(self, tenant: str, value: str, *, deadline: float) -> StartState:
        """The state that a request names or brings along, as one of the running model.

        Raises InvalidRequest, NotFound or StateMismatch with the param `state`, and what the backend raises while it
        makes a state again.
        """
        wanted = await asyncio.to_thread(parse_state, value)
        try:
            if isinstance(wanted, bytes):
                file = await self.open_file(wanted)
                return StartState(file=await self._own(tenant, file, None, deadline))
            return await self._named(tenant, await self.find(tenant, wanted), deadline)
        except InvalidRequest as error:
            error.param = error.param or "state"
            raise
        except StateMismatch as error:
            error.param = "state"
            raise

    async def fingerprint_of(self, tenant: str, value: str) -> str:
        """Of the model that made the state which a request names or brings along. Raises InvalidRequest, NotFound."""
        wanted = await asyncio.to_thread(parse_state, value)
        if not isinstance(wanted, bytes):
            return (await self.find(tenant, wanted)).model_fingerprint
        try:
            return (await self.open_file(wanted)).header.model_fingerprint
        except InvalidRequest as error:
            error.param = error.param or "state"
            raise

    async def _named(self, tenant: str, head: NamedState, deadline: float) -> StartState:
        key = (head.tenant, head.name, head.version, head.created_at)
        async with self._loading.setdefault(key, asyncio.Lock()):  # of many requests at once one loads it
            try:
                start = self._cached.get(key)
                if start is None:
                    stored, file = await self.load(head)
                    own = await self._own(tenant, file, stored.text, deadline)
                    start = StartState(file=own, reference=head.reference)
                    self._cache(key, start)
                else:
                    self._cached.move_to_end(key)
            finally:
                self._loading.pop(key, None)
            return start

    def _require_own_model(self, fingerprint: str) -> None:
        """Raises StateMismatch: a state stays with its model where that is served, and is not made again by another."""
        other = None if fingerprint == self.backend.model.fingerprint else self._name_of(fingerprint)
        if other is not None:
            raise StateMismatch(
                f"the state is of the model {other!r} and stays with it: name that model, or make one with this model",
                param="state",
            )

    def _cache(self, key: tuple[str, str, int, float], start: StartState) -> None:
        self._cached[key] = start
        self._num_cached_bytes += len(start.snapshot.state)
        while self._num_cached_bytes > MAX_CACHED_BYTES and len(self._cached) > 1:
            _, dropped = self._cached.popitem(last=False)
            self._num_cached_bytes -= len(dropped.snapshot.state)

    async def _own(self, tenant: str, file: SessionFile, text: str | None, deadline: float) -> SessionFile:
        """The file as one of the running model and its numerics class."""
        backend, snapshot = self.backend, snapshot_of(file)
        self._require_own_model(file.header.model_fingerprint)
        if file.is_tuned:
            return await asyncio.to_thread(tuned_for, file, backend)
        has_tokenizer = file.header.tokenizer_fingerprint == backend.tokenizer.fingerprint
        if not has_tokenizer and text is not None:
            ids = (await self.prompts.fresh(text, param="state")).ids
            with self.tenants.enter(tenant):
                return await self.reader(deadline).file_of(ids, tenant=tenant, name=file.header.session_id)
        require_tokenizer(file, backend)
        if file.header.model_fingerprint == backend.model.fingerprint:
            await asyncio.to_thread(require_fit, snapshot, backend.model)
            if snapshot.header.numerics == backend.model.numerics:
                return file
        reader = self.reader(deadline)
        with self.tenants.enter(tenant):
            made = await rebuild(
                backend,
                file,
                snapshot,
                request_id=reader.request_id,
                deadline=max(deadline, time.monotonic()),
                state_format=self.state_format,
            )
        header = dataclasses.replace(file.header, model_fingerprint=backend.model.fingerprint)
        return dataclasses.replace(file, header=header, snapshot=made)


def read_stored(stored: StoredState) -> SessionFile:
    """Raises SnapshotCorrupt: what the server itself has stored is no client's fault."""
    try:
        return read_file(stored.file, kind="state")
    except InvalidRequest as error:
        raise SnapshotCorrupt(f"the state {stored.head.reference!r} is damaged: {error}") from error


def new_state(
    tenant: str, name: str, file: SessionFile, *, source: str, text: str | None, metadata: Mapping[str, str]
) -> NewState:
    """What a store is given of a file. Raises InvalidRequest for one without a state."""
    return NewState(
        file=encode_file(renamed(file, tenant=tenant, session_id=name)),
        model_fingerprint=file.header.model_fingerprint,
        position=file.header.position,
        num_tokens=len(file.log_ids),
        source=source,
        text=text,
        metadata=metadata,
    )
