"""Conversations: lists of items that responses read and add to.

A conversation is one document with the ids of its items, each of which is a document too, and the chain that its
responses go on with. The first `num_read` items are what that chain has read; when one of them is deleted, the next
response begins a new chain with those that are left.
"""

from __future__ import annotations

import dataclasses
import json
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from nsm_core.errors import InvalidRequest, NotFound, SessionBusy, VersionConflict
from service.deps import TenantScope
from service.messages import quoted
from service.responses.chain import Chain
from service.responses.records import MAX_TRIES, StoredResponse, let_go_of_sessions
from service.schemas.items import Item
from service.stores.records.base import ABSENT, Record

MAX_ITEMS = 10_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A conversation as it is kept; `version` is the document's.

    `chain`: what has read the first `num_read` items; None: nothing has. `running_id`: the newest response that began,
    until its input and output are here; it reads `num_running` items. `is_stale`: one of these was deleted meanwhile.
    """

    id: str
    created_at: int
    metadata: Mapping[str, str]
    item_ids: tuple[str, ...] = ()
    num_read: int = 0
    chain: Chain | None = None
    running_id: str | None = None
    num_running: int = 0
    is_stale: bool = False
    version: int = ABSENT

    @property
    def session_ids(self) -> set[str]:
        return set() if self.chain is None else self.chain.session_ids

    def to_object(self) -> dict[str, Any]:
        """As the API shows it."""
        return {
            "id": self.id,
            "object": "conversation",
            "created_at": self.created_at,
            "metadata": dict(self.metadata),
        }

    def to_document(self) -> dict[str, Any]:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del fields["version"]
        return {
            **fields,
            "item_ids": list(self.item_ids),
            "metadata": dict(self.metadata),
            "chain": None if self.chain is None else self.chain.to_document(),
        }

    @classmethod
    def from_record(cls, record: Record) -> Conversation:
        fields = dict(record.document)
        fields["item_ids"] = tuple(fields["item_ids"])
        fields["chain"] = None if fields["chain"] is None else Chain.from_document(fields["chain"])
        return cls(**fields, version=record.version)


def conversation_not_found(conversation_id: str, *, param: str = "conversation_id") -> NotFound:
    """The same answer for an id that never was, is deleted, or is another tenant's."""
    message = f"conversation {quoted(conversation_id)} does not exist"
    return NotFound(message, param=param, code="conversation_not_found")


def item_not_found(item_id: str, *, param: str = "item_id") -> NotFound:
    return NotFound(f"item {quoted(item_id)} does not exist in this conversation", param=param, code="item_not_found")


async def create_conversation(
    scope: TenantScope,
    *,
    items: Sequence[Item],
    metadata: Mapping[str, str],
) -> Conversation:
    """Raises QuotaExceeded."""
    await _require_room(scope, [*items, dict(metadata)])
    conversation = Conversation(
        id=f"conv_{uuid.uuid4().hex}",
        created_at=int(time.time()),
        metadata=metadata,
        item_ids=tuple(item["id"] for item in items),
    )
    await _put_items(scope, conversation.id, items)
    return await _put(scope, conversation)


async def load_conversation(
    scope: TenantScope, conversation_id: str, *, param: str = "conversation_id"
) -> Conversation:
    """Raises NotFound."""
    record = await scope.get_record("conversation", conversation_id)
    if record is None:
        raise conversation_not_found(conversation_id, param=param)
    return Conversation.from_record(record)


async def set_metadata(scope: TenantScope, conversation_id: str, metadata: Mapping[str, str]) -> Conversation:
    """New metadata, as a whole. Raises NotFound."""
    return await _change(
        scope, conversation_id, lambda conversation: dataclasses.replace(conversation, metadata=metadata)
    )


async def delete_conversation(scope: TenantScope, conversation_id: str) -> None:
    """The conversation and its items; its responses stay. Raises NotFound."""
    conversation = await load_conversation(scope, conversation_id)
    if not await scope.delete_record("conversation", conversation_id):
        raise conversation_not_found(conversation_id)
    for item_id in conversation.item_ids:
        await _delete_item(scope, conversation_id, item_id)
    await let_go_of_sessions(scope, conversation.session_ids)


async def add_items(scope: TenantScope, conversation_id: str, items: Sequence[Item]) -> None:
    """The next response reads them. Raises NotFound, QuotaExceeded, or InvalidRequest when the conversation is full."""
    ids = tuple(item["id"] for item in items)

    def add(conversation: Conversation) -> Conversation:
        num_items = len(conversation.item_ids) + len(ids)
        if num_items > MAX_ITEMS:
            raise InvalidRequest(f"a conversation must have at most {MAX_ITEMS} items, got {num_items}", param="items")
        return dataclasses.replace(conversation, item_ids=(*conversation.item_ids, *ids))

    add(await load_conversation(scope, conversation_id))
    await _require_room(scope, items)
    try:
        await _put_items(scope, conversation_id, items)
        await _change(scope, conversation_id, add)
    except (InvalidRequest, NotFound):  # others were faster: nobody would ever read these or delete them
        for item_id in ids:
            await _delete_item(scope, conversation_id, item_id)
        raise


async def read_items(scope: TenantScope, conversation_id: str, item_ids: Sequence[str]) -> list[Item]:
    """Those of the items that are still there."""
    names = [_item_key(conversation_id, item_id) for item_id in item_ids]
    records = await scope.services.records.get_many(tenant=scope.tenant, kind="item", record_ids=names)
    return [dict(record.document) for record in records if record is not None]


async def delete_item(scope: TenantScope, conversation_id: str, item_id: str) -> Conversation:
    """The conversation without it; what had read it is given up. Raises NotFound."""
    given_up: set[str] = set()

    def remove(conversation: Conversation) -> Conversation:
        if item_id not in conversation.item_ids:
            raise item_not_found(item_id)
        index = conversation.item_ids.index(item_id)
        item_ids = conversation.item_ids[:index] + conversation.item_ids[index + 1 :]
        changed = dataclasses.replace(conversation, item_ids=item_ids)
        if conversation.running_id is not None and index < conversation.num_running:
            changed = dataclasses.replace(changed, num_running=conversation.num_running - 1, is_stale=True)
        given_up.clear()
        if index < conversation.num_read:
            given_up.update(conversation.session_ids)
            changed = dataclasses.replace(changed, chain=None, num_read=0)
        return changed

    conversation = await _change(scope, conversation_id, remove)
    await _delete_item(scope, conversation_id, item_id)
    await let_go_of_sessions(scope, given_up)
    return conversation


async def begin_turn(scope: TenantScope, read: Conversation, response_id: str) -> None:
    """A response that stands on the items of `read` has begun. Raises SessionBusy when another one did meanwhile."""
    num_items = len(read.item_ids)

    def begin(conversation: Conversation) -> Conversation:
        if conversation.running_id is not None or conversation.item_ids[:num_items] != read.item_ids:
            raise SessionBusy(f"conversation {read.id!r} is busy: another response has begun, or an item was deleted")
        return dataclasses.replace(conversation, running_id=response_id, num_running=num_items, is_stale=False)

    await _change(scope, read.id, begin)


async def forget_turn(scope: TenantScope, read: Conversation) -> None:
    """Nothing will come of the response that `read` says is running."""

    def forget(conversation: Conversation) -> Conversation:
        is_it = conversation.running_id == read.running_id
        return _after_turn(conversation, (), None) if is_it else conversation

    await _change(scope, read.id, forget)


async def finish_turn(scope: TenantScope, stored: StoredResponse) -> None:
    """What an ended response read and said becomes part of its conversation, once; of a failed one nothing does."""
    if stored.conversation_id is None:
        return
    is_retained = stored.response["status"] in ("completed", "incomplete")
    new_items = [*stored.input, *stored.response["output"]] if is_retained else []
    for _ in range(MAX_TRIES):
        try:
            conversation = await load_conversation(scope, stored.conversation_id)
        except NotFound:
            return  # deleted meanwhile
        if conversation.running_id != stored.id:
            return
        await _put_items(scope, conversation.id, new_items)
        changed = _after_turn(conversation, [item["id"] for item in new_items], stored.chain if is_retained else None)
        added = changed.session_ids - conversation.session_ids
        try:
            await _put(scope, changed, holds=added)
        except VersionConflict:
            continue
        await let_go_of_sessions(scope, conversation.session_ids - changed.session_ids)
        return


def _after_turn(conversation: Conversation, new_ids: Sequence[str], chain: Chain | None) -> Conversation:
    """`chain` is None for a turn of which nothing is kept. Items of others come after those that the turn read."""
    ended = dataclasses.replace(conversation, running_id=None, num_running=0, is_stale=False)
    if chain is None:
        return ended
    read = (*conversation.item_ids[: conversation.num_running], *new_ids)
    return dataclasses.replace(
        ended,
        item_ids=(*read, *conversation.item_ids[conversation.num_running :]),
        num_read=0 if conversation.is_stale else len(read),
        chain=None if conversation.is_stale else chain,
    )


async def _change(
    scope: TenantScope, conversation_id: str, change: Callable[[Conversation], Conversation]
) -> Conversation:
    """`change` on the newest version. Raises NotFound and what `change` raises."""
    for _ in range(MAX_TRIES - 1):
        conversation = await load_conversation(scope, conversation_id)
        try:
            return await _put(scope, change(conversation))
        except VersionConflict:
            continue
    return await _put(scope, change(await load_conversation(scope, conversation_id)))


async def _put(scope: TenantScope, conversation: Conversation, *, holds: Collection[str] = ()) -> Conversation:
    version = await scope.put_record(
        "conversation",
        conversation.id,
        conversation.to_document(),
        expected_version=conversation.version,
        holds=holds,
    )
    return dataclasses.replace(conversation, version=version)


async def _require_room(scope: TenantScope, documents: Sequence[Mapping[str, Any]]) -> None:
    """Raises QuotaExceeded."""
    num_bytes = sum(len(json.dumps(document)) for document in documents)
    await scope.services.tenants.check_stored_bytes(scope.tenant, num_new_bytes=num_bytes)


async def _put_items(scope: TenantScope, conversation_id: str, items: Sequence[Item]) -> None:
    """Each once, however often this is done."""
    for item in items:
        try:
            await scope.put_record("item", _item_key(conversation_id, item["id"]), item, expected_version=ABSENT)
        except VersionConflict:  # it is there already
            pass


async def _delete_item(scope: TenantScope, conversation_id: str, item_id: str) -> None:
    await scope.delete_record("item", _item_key(conversation_id, item_id))


def _item_key(conversation_id: str, item_id: str) -> str:
    return f"{conversation_id}/{item_id}"
