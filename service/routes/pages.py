"""Pages of lists by `limit` and `after`, as OpenAI's have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from fastapi import Query
from starlette.responses import Response

from nsm_core.errors import InvalidRequest
from service.schemas.items import page_of
from service.web.errors import shown
from service.web.json_body import json_response

AfterQuery = Annotated[str | None, Query(description="the last id of the page before")]


def page_response(
    objects: Sequence[Mapping[str, Any]], *, limit: int, after: str | None, kind: str, order: str = "desc"
) -> Response:
    """A page of `objects`, which have ids and come the oldest first. Raises InvalidRequest, which calls one `kind`."""
    found = {str(one["id"]): dict(one) for one in objects}
    page = page_of(list(found), limit=limit, order=order, after=after)
    if page is None:
        raise InvalidRequest(f"after must be the id of a {kind} in the list, got {shown(after)}", param="after")
    ids, has_more = page
    first_id, last_id = (ids[0], ids[-1]) if ids else (None, None)
    data = [found[name] for name in ids]
    return json_response(
        {"object": "list", "data": data, "first_id": first_id, "last_id": last_id, "has_more": has_more}
    )
