"""Damaged pages of a store's file as damage of what could not be read, so that the rest can still be read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from nsm_core.errors import SnapshotCorrupt, StoreDamaged, StoreReplaced


@contextlib.contextmanager
def damage_of(what: str) -> Iterator[None]:
    """Around the reading of `what`. Raises SnapshotCorrupt, with the same notes, in place of StoreDamaged.

    StoreReplaced stays as it is: then nothing else can be read either.
    """
    try:
        yield
    except StoreReplaced:
        raise
    except StoreDamaged as error:
        damage = SnapshotCorrupt(f"{what} cannot be read: {error}")
        for note in getattr(error, "__notes__", []):
            damage.add_note(note)
        raise damage from error
