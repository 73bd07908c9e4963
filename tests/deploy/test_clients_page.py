"""docs/clients.md has a row for each client of deploy/docs/clients/clients.toml, at its version."""

from __future__ import annotations

import re

from deploy.docs.clients.__main__ import PAGE, PROGRAMS, Row, read_clients

ROWS = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ")][1:]


def test_every_client_has_a_row_of_its_version() -> None:
    """Otherwise: python -m deploy.docs.clients"""
    rows = [tuple(cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:3]) for row in ROWS if "---" not in row]
    assert [name for name, _ in rows] == [f"{one['name']} ({one['kind']})" for one in read_clients()]
    for client, (_, version) in zip(read_clients(), rows, strict=True):
        pinned = [*client.get("pip", ()), *client.get("npm", ())]
        assert not pinned or pinned[0].endswith(version)


def test_every_client_is_pinned_and_has_its_program() -> None:
    for client in read_clients():
        assert (PROGRAMS / client["program"]).is_file()
        assert all("==" in package for package in client.get("pip", ()))
        assert all("@" in package[1:] for package in client.get("npm", ()))


def test_a_row_tells_what_works_and_what_does_not() -> None:
    checks = (("chat", None), ("tools", "KeyError: a|b"))
    row = Row(name="one", kind="Python", version="1.0", checks=checks)
    assert row.line() == "| one (Python) | 1.0 | chat | tools: `KeyError: a\\|b` |"
