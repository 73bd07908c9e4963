"""Damaged pages of a store's file as damage of what could not be read, so that the rest can still be read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from nsm_core.errors import NsmError, SnapshotCorrupt, StoreDamaged, StoreReplaced

NEW_STORE = "save the rest with `nsm sessions backup`, move the store's files away and restore it"
LAST_BACKUP = "move the store's files away and restore the last backup (docs/operations.md says what may save more)"
OLDER_BACKUP = "an older backup may have it"


@contextlib.contextmanager
def damage_of(what: str, *, remedy: str) -> Iterator[None]:
    """Around the reading of `what`. Raises SnapshotCorrupt, with the same notes, in place of StoreDamaged.

    StoreReplaced stays as it is: then nothing else can be read either. `remedy`: what is left to do.
    """
    try:
        yield
    except StoreReplaced:
        raise
    except StoreDamaged as error:
        damage = SnapshotCorrupt(f"{what} cannot be read; {remedy}: {error}")
        _move_notes(error, damage)
        raise damage from error


@contextlib.contextmanager
def unreadable_list() -> Iterator[None]:
    """Around the reading of the list of sessions. Raises StoreDamaged with what is left to do: without the list nothing
    can be saved.
    """
    with _all_lost("the list of sessions cannot be read", remedy=LAST_BACKUP):
        yield


@contextlib.contextmanager
def unreadable_store() -> Iterator[None]:
    """Around the opening of a store. Raises StoreDamaged with what is left to do."""
    with _all_lost("the store cannot be opened", remedy=f"name another one, or {LAST_BACKUP}"):
        yield


@contextlib.contextmanager
def _all_lost(what: str, *, remedy: str) -> Iterator[None]:
    try:
        yield
    except StoreReplaced:
        raise
    except StoreDamaged as error:
        damage = StoreDamaged(f"{what}; {remedy}: {error}")
        _move_notes(error, damage)
        raise damage from error


def _move_notes(error: StoreDamaged, damage: NsmError) -> None:
    for note in getattr(error, "__notes__", []):
        damage.add_note(note)
