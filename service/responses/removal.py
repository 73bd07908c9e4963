"""What ends a stored response before its time: cancel and delete."""

from __future__ import annotations

from service.deps import Services
from service.responses.records import StoredResponse, let_go_of_sessions, load_response, response_not_found
from service.responses.running import refresh_status, wait_for_result
from service.stores.sessions.key import SessionKey


async def cancel_response(services: Services, tenant: str, response_id: str) -> StoredResponse:
    """The response after its end; one that has ended stays as it is. Raises NotFound."""
    stored = await refresh_status(services, tenant, await load_response(services, tenant, response_id))
    if stored.has_ended:
        return stored
    await services.turns.cancel(SessionKey(tenant, stored.chain.end.session_id))
    return await wait_for_result(services, tenant, stored)


async def delete_response(services: Services, tenant: str, response_id: str) -> None:
    """Raises NotFound."""
    stored = await cancel_response(services, tenant, response_id)
    if not await services.records.delete(tenant=tenant, kind="response", record_id=response_id):
        raise response_not_found(response_id)
    await let_go_of_sessions(services, tenant, stored.chain.session_ids)
