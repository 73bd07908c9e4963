"""The name of one session in a store."""

from __future__ import annotations

from typing import NamedTuple


class SessionKey(NamedTuple):
    """A session of a tenant. Two tenants may use one id for different sessions."""

    tenant: str
    session_id: str
