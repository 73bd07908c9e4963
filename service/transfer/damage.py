"""Damaged pages of a store's file as damage of what could not be read, so that the rest can still be read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

from nsm_core.errors import NsmError, SnapshotCorrupt, StoreDamaged, StoreReplaced

NEW_STORE = "save the rest with `nsm sessions backup`, move the store's files away and restore it"
LAST_BACKUP = "move the store's files away and restore the last backup (docs/operations.md says what may save more)"
OLDER_BACKUP = "an older backup may have it"


def damage_of(what: str, *, remedy: str) -> AbstractContextManager[None]:
    """Around the reading of `what`. Raises SnapshotCorrupt, with the same notes, in place of StoreDamaged.

    StoreReplaced stays as it is: then nothing else can be read either. `remedy`: what is left to do.
    """
    return _damage_as(SnapshotCorrupt, f"{what} cannot be read; {remedy}")


def unreadable_list() -> AbstractContextManager[None]:
    """Around the reading of the list of sessions. Raises StoreDamaged with what is left to do: without the list nothing
    can be saved.
    """
    return _damage_as(StoreDamaged, f"the list of sessions cannot be read; {LAST_BACKUP}")


def unreadable_store() -> AbstractContextManager[None]:
    """Around the opening of a store. Raises StoreDamaged with what is left to do."""
    return _damage_as(StoreDamaged, f"the store cannot be opened; name another one, or {LAST_BACKUP}")


@contextlib.contextmanager
def _damage_as(kind: type[NsmError], message: str) -> Iterator[None]:
    try:
        yield
    except StoreReplaced:
        raise
    except StoreDamaged as error:
        damage = kind(f"{message}: {error}")
        for note in getattr(error, "__notes__", []):
            damage.add_note(note)
        raise damage from error
