"""Long work as it is stored: the object that clients see, and its owner."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from service.stores.records.base import ABSENT, Record
from service.work.ownership import Ownership


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """`fields`: the object that clients see. `ownership`: None while nobody runs it. `version`: the document's.

    `end_statuses`: after which nothing of it changes. A subclass has further fields, which its document keeps as well.
    """

    end_statuses: ClassVar[tuple[str, ...]]

    tenant: str
    fields: Mapping[str, Any]
    ownership: Ownership | None = None
    version: int = ABSENT

    @property
    def id(self) -> str:
        return str(self.fields["id"])

    @property
    def status(self) -> str:
        return str(self.fields["status"])

    @property
    def has_ended(self) -> bool:
        return self.status in self.end_statuses

    @property
    def is_paused(self) -> bool:
        """Whether no process should run it now, though it has not ended."""
        return False

    def changed(self, **fields: Any) -> Self:
        return dataclasses.replace(self, fields={**self.fields, **fields})

    def to_document(self) -> dict[str, Any]:
        document = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del document["tenant"], document["version"]  # parts of the key
        ownership = None if self.ownership is None else dataclasses.asdict(self.ownership)
        return {**document, "ownership": ownership}

    @classmethod
    def from_record(cls, tenant: str, record: Record) -> Self:
        document = dict(record.document)
        owned = document.pop("ownership")
        ownership = None if owned is None else Ownership(**owned)
        return cls(tenant=tenant, ownership=ownership, version=record.version, **document)
