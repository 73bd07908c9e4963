"""A session reads a live body: commit by commit, while it comes.

Each commit tells in its record how far the body was read, in the same transaction. A retry with the same key skips as
much. Two identities take turns: the record before the newest one is forgotten when the next begins. So one of them
always stands, and a long body does not drive out the records of other turns.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any

from nsm_core.errors import InvalidRequest, KeyReused, NsmError
from nsm_core.hashing import new_identity
from service.deps import Services
from service.generate.session_turn import retry_identity
from service.live_input.pieces import Cutter, Piece
from service.state.resume import require_version
from service.stores.sessions.base import SessionHead
from service.stores.sessions.key import SessionKey
from service.turns.append import PROGRESS, AppendRequest, append_to_session, progress_of
from service.turns.turns import require_same

COMMIT_TOKENS = 2048  # a commit has no more pieces once it has so many


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What is committed. `mark`: the version before the first commit. `num_bytes`, `sha256`: of the body so far."""

    mark: int
    version: int
    num_tokens: int
    num_commits: int
    num_bytes: int
    sha256: str


class LiveReading:
    """One body. `expected_version`: None for the version at which the session is when the body begins."""

    def __init__(
        self,
        services: Services,
        key: SessionKey,
        *,
        idempotency_key: str | None,
        expected_version: int | None,
        digest: str,
    ) -> None:
        self._services, self._key = services, key
        self._identities = tuple(
            None if idempotency_key is None else retry_identity(f"{idempotency_key}:{number}", None, digest)
            for number in (0, 1)
        )
        self._digest = digest
        self._version = expected_version
        self._turn_ids: dict[int, str] = {}  # of the two records
        self._done: Progress | None = None
        self._hash = new_identity()
        self._num_bytes = 0
        self._waiting: list[int] = []  # ids that are not committed
        self._num_own_commits = 0

    async def begin(self) -> None:
        """Finds what an earlier try has read. Raises NotFound, VersionConflict or KeyReused."""
        head = await self._services.store.get(self._key)  # first: what is committed after it is a conflict
        for number, identity in enumerate(self._identities):
            if identity is None:
                continue
            record = await self._services.store.get_turn(self._key, identity=identity, with_request=False)
            if record is None or record.status != "committed":
                continue
            require_same(record.digest, self._digest)
            self._turn_ids[number] = record.turn_id
            found = Progress(**progress_of(record))
            if self._done is None or found.num_commits > self._done.num_commits:
                self._done = found
        if self._done is None:
            require_version(head, self._version)
        self._version = head.version if self._done is None else self._done.version

    async def read(
        self, chunks: AsyncIterator[bytes], cutter: Cutter, on_text: Callable[[str], None]
    ) -> tuple[SessionHead, Progress]:
        """The session at the end. Raises what an append raises; the message then tells what was committed.

        `on_text` gets each piece that is read.
        """
        try:
            async for chunk in chunks:
                await self._read(cutter.feed(chunk), on_text)
            await self._read(cutter.end(), on_text)
            done = self._done
            if done is None:
                raise InvalidRequest("the body has no text to read", param="body")
            if done.num_bytes > self._num_bytes:
                raise _other_body()
        except NsmError as error:
            error.args = (f"{error}; {self._reported()}",)
            raise
        return await self._services.store.get(self._key), done

    @property
    def is_replay(self) -> bool:
        """Whether an earlier try had read all of it."""
        return self._num_own_commits == 0

    def _reported(self) -> str:
        if self._done is None:
            return "nothing was read"
        done = self._done
        return f"{done.num_bytes} bytes of the body are read and committed, up to version {done.version}"

    async def _read(self, pieces: Iterable[Piece], on_text: Callable[[str], None]) -> None:
        """Commits all of them, also those before a fault."""
        fault: InvalidRequest | None = None
        try:
            for piece in pieces:
                ids = await self._ids_of(piece)
                if len(self._waiting) + len(ids) > COMMIT_TOKENS:
                    await self._commit()
                self._count(piece)
                if ids:
                    on_text(piece.text)
                    self._waiting += ids
        except InvalidRequest as error:
            fault = error
        await self._commit()
        if fault is not None:
            raise fault

    async def _ids_of(self, piece: Piece) -> list[int]:
        """None of what an earlier try has committed. Raises KeyReused for another body."""
        known = 0 if self._done is None else self._done.num_bytes
        end = self._num_bytes + len(piece.raw)
        if self._num_bytes >= known:
            return await self._services.prompts.encode(piece.text, param="text") if piece.text else []
        if end > known:
            raise _other_body()
        if self._done is not None and end == known:
            whole = self._hash.copy()
            whole.update(piece.raw)
            if whole.hexdigest() != self._done.sha256:
                raise _other_body()
        return []

    def _count(self, piece: Piece) -> None:
        self._hash.update(piece.raw)
        self._num_bytes += len(piece.raw)

    async def _commit(self) -> None:
        if not self._waiting:
            return
        ids, self._waiting = tuple(self._waiting), []
        await self._wait_for_rate()
        services, done = self._services, self._done
        number = 0 if done is None else done.num_commits % 2
        request_id = f"append-{uuid.uuid4().hex}"
        reading = {
            "mark": self._version if done is None else done.mark,
            "num_tokens": 0 if done is None else done.num_tokens,
            "num_commits": 1 + (0 if done is None else done.num_commits),
            "num_bytes": self._num_bytes,
            "sha256": self._hash.hexdigest(),
        }
        appended = await append_to_session(
            services.turns,
            services.backend,
            services.store,
            services.tenants,
            AppendRequest(
                request_id=request_id,
                key=self._key,
                input_ids=ids,
                is_verbatim=False,
                expected_version=self._version,
                arrival=time.monotonic(),
                deadline=time.monotonic() + services.settings.request_timeout_s,
                identity=self._identities[number],
                digest=self._digest,
                extra={PROGRESS: reading},
                replaces=self._turn_ids.get(number),
            ),
        )
        self._turn_ids[number] = request_id
        self._version = appended.head.version
        self._done = _progress(reading, version=appended.head.version, num_new=appended.num_tokens)
        self._num_own_commits += 1

    async def _wait_for_rate(self) -> None:
        """Each commit but the first counts as a request of its own. Where none is left the client has to wait: its body
        is not read meanwhile.
        """
        while self._num_own_commits:
            allowance = self._services.tenants.take(self._key.tenant)
            if allowance is None or allowance.retry_after_s is None:
                return
            await asyncio.sleep(allowance.retry_after_s)


def _progress(reading: Mapping[str, Any], *, version: int, num_new: int) -> Progress:
    return Progress(**{**reading, "version": version, "num_tokens": reading["num_tokens"] + num_new})


def _other_body() -> KeyReused:
    return KeyReused("Idempotency-Key was used before for another body; a new request needs a new key")
