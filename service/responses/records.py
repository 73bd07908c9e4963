"""Stored responses as documents, and which of them still need a session."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from nsm_core.chat_template import Reasoning
from nsm_core.errors import NotFound
from nsm_core.tool_form import ToolFormName
from service.deps import TenantScope
from service.messages import quoted
from service.responses.chain import Chain
from service.responses.format import ENDED, Response
from service.schemas.items import Item, new_item_id
from service.stores.records.base import ABSENT

MAX_TRIES = 20  # of a change that another writer was faster with


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A response before its turn has begun. `digest`: of its body, for a retry with the same key; `reasoning`
    and `tool_form`: see ChatTemplate.

    `earlier`: the failed try that it takes the place of.
    """

    response: Response
    input: list[Item]
    conversation_id: str | None
    digest: str
    reasoning: Reasoning
    tool_form: ToolFormName
    earlier: StoredResponse | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """A response as it is kept. Its turn runs on the session of `chain.end`, under the response's id.

    `chain`: what a next turn inherits; while it runs, and if it failed, where its turn began. `deltas`: the pieces of
    text that its stream has, empty until the end. `conversation_id` is None for a response of none. `version` is the
    document's.
    """

    response: Response
    input: list[Item]
    conversation_id: str | None
    digest: str
    item_id: str
    chain: Chain
    deltas: list[str] = dataclasses.field(default_factory=list)
    reasoning: Reasoning = "none"  # of a response that an earlier build stored
    tool_form: ToolFormName = "hermes"
    version: int = ABSENT

    @classmethod
    def begun(cls, draft: Draft, chain: Chain) -> StoredResponse:
        return cls(
            response=draft.response,
            input=draft.input,
            conversation_id=draft.conversation_id,
            digest=draft.digest,
            item_id=new_item_id(),
            chain=chain,
            reasoning=draft.reasoning,
            tool_form=draft.tool_form,
            version=ABSENT if draft.earlier is None else draft.earlier.version,
        )

    @property
    def id(self) -> str:
        return str(self.response["id"])

    @property
    def has_ended(self) -> bool:
        return self.response["status"] in ENDED

    def to_document(self) -> dict[str, Any]:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del fields["version"]
        return {**fields, "chain": self.chain.to_document()}

    @classmethod
    def from_document(cls, document: Mapping[str, Any], version: int) -> StoredResponse:
        return cls(**{**document, "chain": Chain.from_document(document["chain"]), "version": version})


def response_not_found(response_id: str, *, param: str = "response_id") -> NotFound:
    """The same answer for an id that never was, is deleted, or is another tenant's."""
    code = "previous_response_not_found" if param == "previous_response_id" else "response_not_found"
    return NotFound(f"response {quoted(response_id)} does not exist", param=param, code=code)


async def find_response(scope: TenantScope, response_id: str) -> StoredResponse | None:
    record = await scope.get_record("response", response_id)
    return None if record is None else StoredResponse.from_document(record.document, record.version)


async def load_response(scope: TenantScope, response_id: str, *, param: str = "response_id") -> StoredResponse:
    """Raises NotFound."""
    found = await find_response(scope, response_id)
    if found is None:
        raise response_not_found(response_id, param=param)
    return found


async def put_response(scope: TenantScope, stored: StoredResponse, *, holds: Collection[str] = ()) -> StoredResponse:
    """The response at its new version. `holds`: sessions that it needs from now on. Raises VersionConflict."""
    version = await scope.put_record(
        "response",
        stored.id,
        stored.to_document(),
        expected_version=stored.version,
        holds=holds,
    )
    return dataclasses.replace(stored, version=version)


async def let_go_of_sessions(scope: TenantScope, session_ids: Collection[str]) -> None:
    """One holder less; a session without any is deleted."""
    if not session_ids:
        return
    for session_id in await scope.services.records.let_go(tenant=scope.tenant, session_ids=session_ids):
        with contextlib.suppress(NotFound):
            key = scope.session_key(session_id)
            await scope.services.turns_of(key).delete(key)
