"""What every StateStore keeps to, whatever it is made of."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from nsm_core.errors import VersionConflict
from service.stores.sessions.base import SessionStore
from service.stores.states.base import PUBLISHED, NewState, StateStore, StoredState
from service.stores.states.factory import states_beside


@pytest.fixture
def states(store: SessionStore) -> StateStore:
    return states_beside(store)


def new_state(file: bytes = b"state", **changes: Any) -> NewState:
    fields: dict[str, Any] = {"model_fingerprint": "m", "position": 3, "num_tokens": 4, "source": "text"}
    return NewState(file=file, **{**fields, **changes})


async def test_a_state_comes_back_as_it_was_added(states: StateStore) -> None:
    file, text = bytes(range(256)) * 40, "é\u2028\"' @"
    added = await states.add(
        tenant="a", name="rules", state=new_state(file, text=text, metadata={"team": "ü"}, source="messages")
    )
    assert (added.reference, added.num_bytes, added.metadata) == (
        "rules@1",
        len(file) + len(text.encode()),
        {"team": "ü"},
    )
    assert await states.get(tenant="a", name="rules") == added
    stored = await states.load(tenant="a", name="rules", version=1)
    assert stored is not None
    assert (stored.head, stored.file, stored.text) == (added, file, text)
    without = await states.add(tenant="a", name="rules", state=new_state())
    stored = await states.load(tenant="a", name="rules", version=without.version)
    assert stored is not None
    assert stored.text is None


async def test_versions_rise_and_are_never_given_twice(states: StateStore) -> None:
    for number in range(1, 4):
        assert (await states.add(tenant="a", name="x", state=new_state(bytes(number)))).version == number
    newest = await states.get(tenant="a", name="x")
    assert newest is not None
    assert newest.version == 3
    assert await states.delete(tenant="a", name="x", version=3) == 1
    assert await states.delete(tenant="a", name="x", version=3) == 0
    newest = await states.get(tenant="a", name="x")
    assert newest is not None
    assert newest.version == 2
    assert await states.delete(tenant="a", name="x") == 2
    assert await states.get(tenant="a", name="x") is None
    assert (await states.add(tenant="a", name="x", state=new_state())).version == 4


async def test_the_newest_is_the_newest_that_is_there(states: StateStore) -> None:
    for _ in range(3):
        await states.add(tenant="a", name="rules", state=new_state())
    await states.delete(tenant="a", name="rules", version=3)
    newest, middle = await states.get(tenant="a", name="rules"), await states.get(tenant="a", name="rules", version=1)
    assert newest is not None
    assert middle is not None
    assert (newest.version, middle.version) == (2, 1)
    assert await states.get(tenant="a", name="rules", version=3) is None


async def test_of_additions_at_once_each_has_a_version(states: StateStore) -> None:
    added = await asyncio.gather(
        *(states.add(tenant="a", name="x", state=new_state(bytes([number]))) for number in range(8))
    )
    assert sorted(state.version for state in added) == list(range(1, 9))
    for number, state in enumerate(added):
        stored = await states.load(tenant="a", name="x", version=state.version)
        assert stored is not None
        assert stored.file == bytes([number])


async def test_what_differs_in_tenant_or_name_is_another_state(states: StateStore) -> None:
    for tenant, name in (("a", "x"), ("b", "x"), (PUBLISHED, "x"), ("a", "x1")):  # published last
        await states.add(tenant=tenant, name=name, state=new_state(f"{tenant}{name}".encode()))
    assert [state.reference for state in await states.list(tenant="a")] == ["x@1", "x1@1"]
    stored = await states.load(tenant=PUBLISHED, name="x", version=1)
    assert stored is not None
    assert stored.file == b"*x"
    assert await states.delete(tenant="a", name="x") == 1
    assert await states.get(tenant="b", name="x") is not None
    assert await states.load(tenant="a", name="x", version=1) is None


async def test_a_list_is_by_name_the_newest_version_first(states: StateStore) -> None:
    assert await states.list(tenant="a") == ()
    for name in ("b", "a", "b"):
        await states.add(tenant="a", name=name, state=new_state())
    assert [state.reference for state in await states.list(tenant="a")] == ["a@1", "b@2", "b@1"]


async def test_what_states_take_is_counted_and_given_back(states: StateStore) -> None:
    assert await states.usage(tenant="a") == 0
    await states.add(tenant="a", name="x", state=new_state(b"12345", text="ü"))
    await states.add(tenant="a", name="y", state=new_state(b"123"))
    await states.add(tenant="b", name="y", state=new_state(b"1"))
    assert await states.usage(tenant="a") == 10
    await states.delete(tenant="a", name="x")
    assert await states.usage(tenant="a") == 3


async def test_a_state_that_is_not_there_is_none(states: StateStore) -> None:
    await states.add(tenant="a", name="x", state=new_state())
    assert await states.get(tenant="a", name="x", version=2) is None
    assert await states.get(tenant="a", name="other") is None
    assert await states.load(tenant="a", name="x", version=2) is None
    assert await states.delete(tenant="a", name="x", version=7) == 0


async def test_a_published_name_is_refused_to_a_tenant_that_has_no_version(states: StateStore) -> None:
    await states.add(tenant="a", name="x", state=new_state())
    await states.add(tenant=PUBLISHED, name="x", state=new_state())
    assert (await states.add(tenant="a", name="x", state=new_state())).version == 2
    with pytest.raises(VersionConflict, match="published"):
        await states.add(tenant="b", name="x", state=new_state())
    assert await states.list(tenant="b") == ()
    assert await states.usage(tenant="b") == 0
    assert (await states.add(tenant=PUBLISHED, name="x", state=new_state())).version == 2


async def test_of_a_publication_and_tenants_at_once_no_tenant_is_later(states: StateStore) -> None:
    """Whoever was refused has nothing, and whoever was not was there before."""
    tenants = [f"t{number}" for number in range(6)]
    owners = (*tenants[:3], PUBLISHED, *tenants[3:])
    added = await asyncio.gather(
        *(states.add(tenant=owner, name="x", state=new_state()) for owner in owners), return_exceptions=True
    )
    for owner, one in zip(owners, added, strict=True):
        assert (await states.get(tenant=owner, name="x") is None) == isinstance(one, VersionConflict)
    with pytest.raises(VersionConflict):
        await states.add(tenant="late", name="x", state=new_state())


async def stored_version(states: StateStore, *, tenant: str = "a", name: str = "x", version: int = 1) -> StoredState:
    stored = await states.load(tenant=tenant, name=name, version=version)
    assert stored is not None
    return stored


async def test_a_restored_version_has_its_number_its_time_and_its_bytes(states: StateStore) -> None:
    await states.add(tenant="b", name="x", state=new_state(b"two", text="ü", metadata={"team": "ü"}))
    made = await stored_version(states, tenant="b")
    wanted = dataclasses.replace(made, head=dataclasses.replace(made.head, tenant="a", version=7, created_at=12.5))
    assert await states.restore(wanted, newest=9)
    assert await stored_version(states, version=7) == wanted
    assert await states.get(tenant="a", name="x", version=7) == wanted.head
    assert await states.usage(tenant="a") == wanted.head.num_bytes
    assert await states.newest_version(tenant="a", name="x") == 9
    assert (await states.add(tenant="a", name="x", state=new_state())).version == 10


async def test_the_newest_is_found_where_a_higher_number_was_given_before(states: StateStore) -> None:
    await states.add(tenant="a", name="x", state=new_state())
    made = await stored_version(states)
    await states.delete(tenant="a", name="x")
    assert await states.restore(made, newest=9)
    assert await states.get(tenant="a", name="x") == made.head


async def test_what_is_there_is_not_restored_over(states: StateStore) -> None:
    await states.add(tenant="a", name="x", state=new_state(b"mine"))
    before = await stored_version(states)
    other = dataclasses.replace(before, file=b"another")
    assert not await states.restore(other, newest=5)
    assert await stored_version(states) == before
    assert await states.newest_version(tenant="a", name="x") == 1
    assert await states.usage(tenant="a") == before.head.num_bytes


async def test_of_restorations_at_once_one_is_new(states: StateStore) -> None:
    await states.add(tenant="a", name="x", state=new_state(b"one"))
    stored = await stored_version(states)
    await states.delete(tenant="a", name="x")
    found = await asyncio.gather(*(states.restore(stored, newest=1) for _ in range(6)))
    assert sorted(found) == [False] * 5 + [True]
    assert await stored_version(states) == stored


async def test_an_older_version_comes_back_below_the_newest(states: StateStore) -> None:
    await states.add(tenant="a", name="x", state=new_state(b"one"))
    first = await stored_version(states)
    await states.add(tenant="a", name="x", state=new_state(b"two"))
    await states.delete(tenant="a", name="x", version=1)
    assert await states.restore(first, newest=1)
    assert [state.version for state in await states.list(tenant="a")] == [2, 1]
    assert await states.newest_version(tenant="a", name="x") == 2


async def test_the_newest_number_outlives_its_version(states: StateStore) -> None:
    assert await states.newest_version(tenant="a", name="x") == 0
    await states.add(tenant="a", name="x", state=new_state())
    await states.delete(tenant="a", name="x")
    assert await states.newest_version(tenant="a", name="x") == 1


async def test_a_published_name_is_not_restored_for_a_tenant_that_has_no_version(states: StateStore) -> None:
    await states.add(tenant="a", name="x", state=new_state(b"one"))
    first = await stored_version(states)
    await states.add(tenant="a", name="x", state=new_state(b"two"))
    await states.add(tenant=PUBLISHED, name="x", state=new_state())
    await states.delete(tenant="a", name="x", version=1)
    assert await states.restore(first, newest=1)  # the tenant has a version
    await states.delete(tenant="a", name="x")
    with pytest.raises(VersionConflict, match="published"):
        await states.restore(first, newest=1)
    assert await states.list(tenant="a") == ()


async def test_whoever_has_a_state_is_listed_and_published_ones_come_last(states: StateStore) -> None:
    assert await states.list_tenants() == ()
    for tenant in ("é b", "a", PUBLISHED):
        await states.add(tenant=tenant, name="x", state=new_state())
    await states.add(tenant="gone", name="y", state=new_state())
    await states.delete(tenant="gone", name="y")
    assert await states.list_tenants() == ("a", "é b", PUBLISHED)
