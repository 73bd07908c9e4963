"""What ends a stored response before its time: cancel and delete."""

from __future__ import annotations

from service.deps import TenantScope
from service.responses.records import StoredResponse, let_go_of_sessions, load_response, response_not_found
from service.responses.running import refresh_status, wait_for_result


async def cancel_response(scope: TenantScope, response_id: str) -> StoredResponse:
    """The response after its end; one that has ended stays as it is. Raises NotFound."""
    stored = await refresh_status(scope, await load_response(scope, response_id))
    if stored.has_ended:
        return stored
    key = scope.session_key(stored.chain.end.session_id)
    await scope.services.turns_of(key).cancel(key)
    return await wait_for_result(scope, stored)


async def delete_response(scope: TenantScope, response_id: str) -> None:
    """Raises NotFound."""
    stored = await cancel_response(scope, response_id)
    if not await scope.delete_record("response", response_id):
        raise response_not_found(response_id)
    await let_go_of_sessions(scope, stored.chain.session_ids)
