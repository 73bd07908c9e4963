"""The right to write one session."""

from __future__ import annotations

import dataclasses

from service.stores.sessions.key import SessionKey


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to write one session. `created_at` is the session's incarnation, `expires_at` by the store's clock."""

    tenant: str
    session_id: str
    created_at: float
    holder: str
    fence: int
    expires_at: float

    @property
    def key(self) -> SessionKey:
        return SessionKey(self.tenant, self.session_id)
